"""Completes prompts on a GPU with CUDA graphs: in a batch of fixed shape, finished rows are refilled.

It writes what core.generation.generate writes.
"""

import sys
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from core.cache import RowCache, new_cache
from core.device import ids_on
from core.distributions import KeptCollector, KeptTokens, draw_tokens, rows_at_once
from core.errors import one_line
from core.generation import Generation
from core.model import LANGUAGE_MODEL
from core.performance.sharding import has_parts

LOOK = 16        # steps between two looks of the host at the rows
ROWS = 8         # rows of the smallest batch
COLUMNS = 256    # a cache has a multiple of so many columns
REFILL = 1 / 8   # share of the batch that has ended when it is filled again


def can_decode(model):
    """Tells whether a Decoder can run a model: it is whole, and each layer keeps the keys and values of all tokens."""
    whole = not any(map(has_parts, model.modules()))
    return whole and model.mode == LANGUAGE_MODEL and getattr(model, "reads_columns", True)


class Decoder:
    """Decodes completions with one model. Its buffers and graphs stay from call to call.

    `row` has a row for each of the n completions in the batch, (n, 1) each:
    number: the completion, the last one of `out` for none; token: read next; t: the column that is drawn then
    padding: columns of the cache without a token; live: the row is written; ended: a stop token was drawn
    `out` has a row for each of the N completions of a call, (N + 1, L + 1) each: target, logp and drawn as in
    core.generation.Rows, noise, and given: tokens of answers, -1 where the policy writes
    kept (n, LOOK, V): the tokens that could be drawn, of column t at t % LOOK
    start (1,): columns of the cache before the completions
    """

    def __init__(self, model, rows=ROWS):
        """rows: the most completions that are in the batch at a time"""
        self.model, self.rows = model, rows
        self.sizes = 0, 0, 0, 0, 0
        self.cast = None
        self.captures = True  # False once a step could not be captured

    @torch.no_grad()
    def __call__(self, prompt, padding, uniform, stop, turns=None, **sampling):
        """The Generation that core.generation.generate returns."""
        kind, self.stop_ids = prompt.device.type, stop.ids
        casts = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        batch = Batch(self, prompt, padding, uniform, stop, turns, sampling)
        with self.cast_weights(dtype if casts else torch.float32):
            with torch.autocast(kind, dtype, casts, cache_enabled=False):  # a graph would hold what is in its cache
                while batch.fill():
                    self.steps(batch.n, batch.width(), batch.L, sampling)
                    batch.look()
                    batch.narrow()
        return batch.generation()

    @contextmanager
    def cast_weights(self, dtype):
        """Within, linear layers have weights in this precision, to which autocast would cast them for each token. The
        products are those of training."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, nn.Linear)]
        layers = [layer for layer in layers if layer.weight.dtype == torch.float32 != dtype]
        full = [layer.weight for layer in layers]
        if self.cast is None or len(self.cast) != len(full):
            self.cast = [nn.Parameter(weight.to(dtype), requires_grad=False) for weight in full]
        try:
            if full:
                torch._foreach_copy_(self.cast, full)
            for layer, weight in zip(layers, self.cast, strict=True):
                layer.weight = weight
            yield
        finally:
            for layer, weight in zip(layers, full, strict=True):
                layer.weight = weight

    def begin(self, past, sizes, start, noise):
        """Empties the buffers for the completions of a call, after making larger ones if need be.

        past: a Cache of prompts; sizes: rows, columns of the cache, completions, tokens of each, tokens of the
        vocabulary where truncation leaves some out
        """
        sizes = tuple(map(max, self.sizes, sizes))
        if sizes != self.sizes:
            self.row, self.out, self.kept, self.layers, self.graphs, self.pool = {}, {}, None, [], {}, None  # memory
            n, width, N, L, V = self.sizes = sizes
            self.layers = [[x.new_zeros(n, x.shape[1], width, x.shape[3]) for x in pair] for pair in past.layers]
            one = torch.zeros(n, 1, dtype=torch.long, device=noise.device)
            many = one.new_zeros(N + 1, L + 1)
            self.row = {name: one.clone() for name in ("number", "token", "t", "padding")}
            self.row |= {name: one.bool() for name in ("live", "ended")}
            self.out = {"target": many, "logp": many.float(), "drawn": many.bool(), "noise": many.double(),
                        "given": many.clone()}
            self.kept = one.new_zeros(n, LOOK, V, dtype=torch.bool)
            self.start = one[0].clone()
        for x in (*self.row.values(), *self.out.values(), *(x for pair in self.layers for x in pair)):
            x.zero_()  # NaN of an earlier call would spoil what reads other columns
        N, L = noise.shape
        self.row["number"].fill_(self.sizes[2])
        self.out["given"].fill_(-1)
        self.out["noise"][:N, :L] = noise
        self.start.fill_(start)

    def steps(self, n, width, L, sampling):
        """LOOK steps of the first n rows, whose caches have `width` columns, for completions of L tokens."""
        key = n, width, L, self.stop_ids, *sampling.items()
        step = self.graphs.get(key) or partial(self.step, n, width, L, **sampling)
        for _ in range(LOOK):
            step()
        if key not in self.graphs:  # the steps have warmed up what the graph will hold
            self.graphs[key] = self.captured(step)

    def step(self, n, width, L, **sampling):
        """Draws a token of each of the first n rows. No value comes to the host."""
        row = {name: x[:n] for name, x in self.row.items()}
        t, live = row["t"], row["live"]                                              # (n, 1) each
        place = row["number"], t
        column = (self.start + t).clamp(max=min(width, self.model.longest_input) - 1)  # of a row that ended there
        past = RowCache([[x[:n, :, :width] for x in pair] for pair in self.layers], column)
        h = self.model.states(row["token"], None, past, row["padding"][:, 0])[:, 0]  # (n, C)
        token, logp, kept = draw_tokens(self.model, h, self.out["noise"][place], keep=torch.clone, **sampling)
        given = self.out["given"][place]                                             # (n, 1)
        token = torch.where(given < 0, token, given)
        drawn = live & (given < 0)
        if kept is not None:
            self.kept[torch.arange(n, device=t.device), t[:, 0] % LOOK] = kept
        self.out["target"][place] = token  # a row that is not live writes behind its end
        self.out["logp"][place] = logp * drawn
        self.out["drawn"][place] = drawn
        row["token"].copy_(token)
        row["ended"] |= (token == ids_on(token.device, *self.stop_ids)).any(1, True) & drawn
        t += live
        live &= ~row["ended"] & (t < L)

    def captured(self, step):
        """A function that does what step() does: on a GPU, by launching a CUDA graph. All graphs share memory for what
        they compute on the way: what stays is in the buffers."""
        if self.start.device.type != "cuda" or not self.captures:
            return step
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(torch.cuda.current_stream()):  # a capture that fails stays on its own
                with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                    step()
        except RuntimeError as error:
            self.captures = False
            sys.stderr.write(f"sampling goes on without CUDA graphs, more slowly: {one_line(error, 200)}\n")
            return step
        return graph.replay


class Batch:
    """The N = P * G completions of one call of a Decoder, as the host sees them.

    n: rows that the next steps have; number: {row: the completion in it}; begun: completions that have had a row
    length: (N,) the columns of each completion that were there at the last look
    """

    def __init__(self, decoder, prompt, padding, uniform, stop, turns, sampling):
        self.decoder, self.prompt, self.padding = decoder, prompt, padding
        self.noise, self.group_size = uniform.flatten(0, 1), uniform.shape[1]        # (N, L)
        self.stop, self.turns = stop, turns
        self.N, self.L = self.noise.shape
        self.n = decoder.rows
        while self.n // 2 >= max(ROWS, self.N):  # few sizes, because each has its graphs
            self.n //= 2
        self.number, self.begun = {}, 0
        self.length = [0] * self.N
        self.truncated = torch.ones(self.N, dtype=torch.bool)
        truncates = sampling.get("top_p", 1) < 1 or sampling.get("top_k") or sampling.get("min_p")
        self.vocabulary = decoder.model.vocabulary if truncates else 0
        self.collector = KeptCollector()

    def fill(self):
        """Gives free rows the next completions, once there are enough of them. Returns whether any row has one."""
        free = [r for r in range(self.n) if r not in self.number]
        left = self.N - self.begun
        if left and len(free) >= REFILL * self.n:
            self.read(free[:left])
        return bool(self.number)

    def read(self, rows):
        """Reads the prompts of the next completions, all but their last tokens, into the caches of these rows."""
        decoder, T = self.decoder, self.prompt.shape[1]
        numbers = torch.arange(self.begun, self.begun + len(rows))                   # (k,)
        problems, which = map(self.on_device, (numbers // self.group_size).unique(return_inverse=True))  # (p,), (k,)
        prompt = self.prompt[problems]                                               # (p, T)
        padding = None if self.padding is None else self.padding[problems]
        past = new_cache(decoder.model)
        decoder.model.states(prompt[:, :-1], None, past, padding)
        if self.begun == 0:
            sizes = self.n, self.rounded(T + self.L), self.N, self.L, self.vocabulary
            decoder.begin(past, sizes, T - 1, self.on_device(self.noise))
        place = self.on_device(rows)
        for new, pair in zip(past.layers, decoder.layers, strict=True):
            for x, buffer in zip(new, pair, strict=True):
                buffer[place, :, : T - 1] = x[which]
        self.put(rows, numbers[:, None], token=prompt[which, -1:], t=torch.zeros_like(numbers)[:, None])
        if padding is not None:
            decoder.row["padding"][place] = padding[which, None]
        self.number |= zip(rows, numbers.tolist(), strict=True)
        self.begun += len(rows)

    def put(self, rows, number, **values):
        """Lets rows write completions `number` (k, 1) from a token and a column t on."""
        row, place = self.decoder.row, self.on_device(rows)
        for name, x in {"number": number, **values}.items():
            row[name][place] = self.on_device(x)
        row["live"].index_fill_(0, place, True)
        row["ended"].index_fill_(0, place, False)
        if self.turns is not None:
            number = number[:, 0]
            self.decoder.out["given"][self.on_device(number), : self.L] = self.on_device(self.turns.given[number])

    def on_device(self, x):
        return torch.as_tensor(x).to(self.prompt.device, non_blocking=True)

    def rounded(self, columns):
        return -(-columns // COLUMNS) * COLUMNS

    def width(self):
        """Columns of the caches that the next steps can come to."""
        longest = max(self.length[number] for number in self.number.values())
        return min(self.rounded(self.prompt.shape[1] + longest + LOOK), self.decoder.sizes[1])

    def look(self):
        """Takes completions that have ended out of the batch, and lets the environment answer."""
        row, out = self.decoder.row, self.decoder.out
        state = torch.cat([row["t"], row["ended"]], 1)[: self.n].tolist()            # the one wait of these steps
        if self.turns is not None or self.stop.sequences:
            target, drawn = out["target"].cpu(), out["drawn"].cpu()                  # (N + 1, L + 1) each
        new, over, answered = [], [], []
        for r, number in self.number.items():
            (t, ended), first = state[r], self.length[number]
            if self.stop.sequences:
                t, ended = self.earliest_end(number, t, ended, target[number, :t], drawn[number, first:t])
            new += [(r, number, column) for column in range(first, t)]
            self.length[number] = t
            if ended and self.turns is not None:
                ended = self.turns.ends(number, target[number, :t].tolist())
                if not ended and t < self.L:
                    answered.append((r, number, t))
            if ended or t == self.L:
                self.truncated[number] = not ended
                over.append(r)
        if self.vocabulary:
            self.collect(torch.tensor(new).view(-1, 3))
        if answered:
            rows, number, t = torch.tensor(answered).unbind(1)                       # (k,) each
            self.put(rows, number[:, None], token=target[number, t - 1, None], t=t[:, None])
        row["live"].index_fill_(0, self.on_device(over).long(), False)
        for r in over:
            del self.number[r]

    def earliest_end(self, number, t, ended, target, drawn):
        """The column behind the first token since the last look that ends a turn of a completion, and whether there is
        one. target: (t,) tokens so far; drawn: of those since the last look, the ones that the policy wrote"""
        first = self.length[number]
        begin = 0 if self.turns is None else self.turns.episodes[number].turns[-1]
        ends = self.stop(target[None], first, [begin])[0] & drawn                    # (t - first,)
        return (first + int(ends.nonzero()[0]) + 1, True) if ends.any() else (t, ended)

    def collect(self, new):
        """Takes over the kept tokens of the last steps. new: (k, 3) row, completion and column of each token"""
        _, number, column = self.on_device(new).unbind(1)                            # (k,) each
        new = new[self.decoder.out["drawn"][number, column].cpu()]
        for part in new.split(rows_at_once(self.vocabulary, self.prompt.device)):
            row, number, column = part.unbind(1)
            mask = self.decoder.kept[self.on_device(row), self.on_device(column % LOOK), : self.vocabulary]
            self.collector.add(number * self.L + column, KeptTokens.of(mask))

    def narrow(self):
        """Halves the batch if the completions that are left fit into it."""
        half = self.n // 2
        if self.begun < self.N or half < ROWS or len(self.number) > half or not self.number:
            return
        index = self.on_device([*self.number, *(r for r in range(self.n) if r not in self.number)][:half])
        for x in (*self.decoder.row.values(), *(x for pair in self.decoder.layers for x in pair)):
            x[:half] = x[index]
        self.n, self.number = half, dict(enumerate(self.number.values()))

    def generation(self):
        """The Generation, whose longest completion has M tokens."""
        M = max(self.length)
        real = self.on_device(torch.arange(M) < torch.tensor(self.length)[:, None])  # (N, M)
        target, logp, drawn = (self.decoder.out[name][: self.N, :M] * real for name in ("target", "logp", "drawn"))
        return Generation(target, drawn.float(), logp, self.collector.joined(), self.on_device(self.truncated))
