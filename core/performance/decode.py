"""Completes prompts on a GPU with CUDA graphs: in a batch of fixed shape, finished rows are refilled.

It writes what core.generation.generate writes.
"""

import copy
import sys
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from core.cache import RowCache, new_cache
from core.device import ids_on
from core.distributions import draw_tokens, rows_at_once
from core.generation import Generation
from core.model import LANGUAGE_MODEL
from core.performance.prepacked import CONV1D
from core.performance.sharding import has_parts
from core.settings.user_code import one_line
from core.truncation import KeptCollector, KeptTokens

LOOK = 16        # steps between two looks of the host at the rows
ROWS = 8         # rows of the smallest batch; the others are 2, 4, 8, ... times as large
COLUMNS = 256    # a cache has a multiple of so many columns
FREE = {"live": False, "t": 0, "start": 0, "padding": 0}  # a row without a completion
REFILL = 1 / 8   # share of the batch that has ended when it is filled again


def can_decode(model):
    """Tells whether a Decoder can run a model: it is whole, and each layer keeps the keys and values of all tokens."""
    whole = not any(map(has_parts, model.modules()))
    return whole and model.mode == LANGUAGE_MODEL and getattr(model, "reads_columns", True)


class Decoder:
    """Decodes completions with one model. Its buffers and graphs stay from call to call.

    A step reads and writes `row`, which has a row for each of the n completions in the batch:
    token (n, 1): read next; t (n, 1): the column of the completion that is drawn then
    start (n, 1): columns of the cache before the completion; padding (n, 1): those that hold no token; end (n, 1): L
    live (n, 1) bool: it is written; ended (n, 1) bool: a stop token was drawn
    noise (n, L + 1); given (n, L + 1): tokens of answers, -1 where the policy writes
    target, logp, drawn (n, L + 1): as in core.generation.Rows; a row that is not live writes behind its end
    kept (n, LOOK, V / 8): bits of the tokens that could be drawn; place (n, LOOK): for which column, -1 for none
    """

    def __init__(self, model, rows=ROWS):
        """rows: the most completions that are in the batch at a time"""
        self.rows = rows
        self.source = self.model = model
        self.sizes = 0, 0, 0, 0
        self.row, self.layers, self.graphs, self.pool = {}, [], {}, None
        self.captures = True  # False once a step could not be captured

    @torch.no_grad()
    def __call__(self, prompt, padding, uniform, stop, turns=None, **sampling):
        """The Generation that core.generation.generate returns."""
        kind, self.stop_ids = prompt.device.type, stop.ids
        casts = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        if casts:
            self.cast_weights(dtype)
        batch = Batch(self, prompt, padding, uniform, stop, turns, sampling)
        with torch.autocast(kind, dtype, casts, cache_enabled=False):  # a graph would hold what is in its cache
            while batch.fill():
                self.steps(batch.n, batch.width(), sampling)
                batch.look()
                batch.narrow()
        return batch.generation()

    def cast_weights(self, dtype):
        """Brings the weights of linear layers in this precision, to which autocast would cast them for each token, up
        to date. All others are the source's own, and the products are those of training."""
        if self.model is self.source:
            own = [*self.source.parameters(), *self.source.buffers()]
            self.model = copy.deepcopy(self.source, {id(x): x for x in own})
            layers = [layer for layer in self.model.modules() if type(layer).__name__ in ("Linear", CONV1D)]
            weights = [layer._parameters.get("weight") for layer in layers]  # peft's Linear has none of its own
            layers = [layer for layer, x in zip(layers, weights) if x is not None and x.dtype == torch.float32]
            self.full = [layer.weight for layer in layers]
            for layer in layers:
                layer.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
            self.cast = [layer.weight for layer in layers]
        if self.full:
            torch._foreach_copy_(self.cast, self.full)

    def reserve(self, past, *sizes):
        """Makes buffers for at least so many rows, columns of the cache, tokens of a completion, and bytes of bits."""
        sizes = tuple(map(max, self.sizes, sizes))
        if sizes == self.sizes:
            return
        n, width, L, bits = sizes
        self.row, self.layers, self.graphs, self.pool = {}, [], {}, None  # first of all their memory is free
        self.layers = [[x.new_zeros(n, x.shape[1], width, x.shape[3]) for x in pair] for pair in past.layers]
        one = torch.zeros(n, 1, dtype=torch.long, device=self.layers[0][0].device)
        flag, many = one.bool(), one.repeat(1, L + 1)
        self.row = {name: one.clone() for name in ("token", "t", "start", "padding", "end")} | {
            "live": flag, "ended": flag.clone(), "noise": many.double(), "given": many - 1, "target": many,
            "logp": many.float(), "drawn": many.bool(), "place": one.repeat(1, LOOK),
            "kept": torch.zeros(n, LOOK, bits, dtype=torch.uint8, device=one.device)}
        self.slot = one[0].clone()                                                   # (1,) of `kept`, the next one
        self.sizes = sizes

    def steps(self, n, width, sampling):
        """LOOK steps of the first n rows, whose caches have `width` columns."""
        self.slot.zero_()
        key = n, width, self.stop_ids, *sampling.items()
        step = self.graphs.get(key) or partial(self.step, n, width, **sampling)
        for _ in range(LOOK):
            step()
        if key not in self.graphs:  # the steps have warmed up what the graph will hold
            self.graphs[key] = self.captured(step)

    def step(self, n, width, **sampling):
        """Draws a token of each of the first n rows. No value comes to the host."""
        row = {name: x[:n] for name, x in self.row.items()}
        t, live = row["t"], row["live"]                                              # (n, 1) each
        column = (row["start"] + t).clamp(max=self.model.longest_input - 1)  # that of a row which ended there
        past = RowCache([[x[:n, :, :width] for x in pair] for pair in self.layers], column)
        h = self.model.states(row["token"], None, past, row["padding"][:, 0])[:, 0]  # (n, C)
        noise, given = row["noise"].gather(1, t), row["given"].gather(1, t)          # (n, 1) each
        token, logp, kept = draw_tokens(self.model, h, noise, keep=as_bits, **sampling)
        token = torch.where(given < 0, token, given)
        drawn = live & (given < 0)
        if kept is not None:
            row["kept"].index_copy_(1, self.slot, kept[:, None])
            row["place"].index_copy_(1, self.slot, torch.where(drawn, t, -1))
            self.slot += 1
        for name, x in {"target": token, "logp": logp * drawn, "drawn": drawn}.items():
            row[name].scatter_(1, t, x)
        row["token"].copy_(token)
        row["ended"] |= (token == ids_on(token.device, *self.stop_ids)).any(1, True) & drawn
        t += live
        live &= ~row["ended"] & (t < row["end"])

    def captured(self, step):
        """A function that does what step() does: on a GPU, by launching a CUDA graph. All graphs share memory for what
        they compute on the way: what stays is in the buffers."""
        if self.slot.device.type != "cuda" or not self.captures:
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


def as_bits(mask):
    """A mask (n, V) bool as (n, V / 8) bytes."""
    bits = F.pad(mask, (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8))                # (n, V / 8, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(2, dtype=torch.uint8)


def as_mask(bits, V):
    """The mask (n, V) bool that as_bits took."""
    mask = bits[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1  # (n, V / 8, 8)
    return mask.flatten(1)[:, :V].bool()


class Batch:
    """The N = P * G completions of one call of a Decoder, as the host sees them.

    n: rows that the next steps have; number: the completion of each row, None where there is none
    seen: the column that each row has come to, at the last look; begun: completions that have had a row
    """

    def __init__(self, decoder, prompt, padding, uniform, stop, turns, sampling):
        self.decoder, self.prompt, self.padding = decoder, prompt, padding
        self.noise, self.group_size = uniform.flatten(0, 1), uniform.shape[1]        # (N, L)
        self.stop, self.turns = stop, turns
        self.n = ROWS
        while self.n < min(decoder.rows, len(self.noise)):
            self.n *= 2
        self.number, self.seen, self.begun = [None] * self.n, [0] * self.n, 0
        self.longest = 0
        left = [decoder.row[name] for name in FREE.keys() & decoder.row.keys()]
        for x in (*left, *(x for pair in decoder.layers for x in pair)):  # NaN would spoil what reads other columns
            x.zero_()
        truncates = sampling.get("top_p", 1) < 1 or sampling.get("top_k") or sampling.get("min_p")
        self.bits = -(-decoder.model.vocabulary // 8) if truncates else 0
        self.collector = KeptCollector()
        self.out = {"target": torch.zeros(self.noise.shape, dtype=torch.long, device=prompt.device),
                    "logp": torch.zeros(self.noise.shape, device=prompt.device),
                    "drawn": torch.zeros(self.noise.shape, dtype=torch.bool, device=prompt.device)}
        self.truncated = torch.ones(len(self.noise), dtype=torch.bool)

    def fill(self):
        """Gives rows that are free the next completions, once there are enough of them. Returns whether any row has
        one."""
        free = [r for r, number in enumerate(self.number) if number is None]
        count = min(len(free), len(self.noise) - self.begun, self.decoder.rows - self.n + len(free))
        if count > 0 and len(free) >= REFILL * self.n:
            self.read(free[:count], torch.arange(self.begun, self.begun + count))
            self.begun += count
        return any(number is not None for number in self.number)

    def read(self, rows, numbers):
        """Reads the prompts of completions, all but their last tokens, into the caches of these rows."""
        decoder, T, L = self.decoder, self.prompt.shape[1], self.noise.shape[1]
        problems, which = map(self.on_device, (numbers // self.group_size).unique(return_inverse=True))  # (p,), (k,)
        prompt = self.prompt[problems]                                               # (p, T)
        padding = None if self.padding is None else self.padding[problems]
        past = new_cache(decoder.model)
        decoder.model.states(prompt[:, :-1], None, past, padding)
        decoder.reserve(past, self.n, self.rounded(T + L), L, self.bits)
        place = self.on_device(rows)
        for new, pair in zip(past.layers, decoder.layers, strict=True):
            for x, buffer in zip(new, pair, strict=True):
                buffer[place, :, : T - 1] = x[which]
        padding = 0 if padding is None else padding[which, None]
        given = -1 if self.turns is None else self.turns.given[numbers]
        self.put(rows, token=prompt[which, -1:], t=0, start=T - 1, padding=padding, end=L, live=True, ended=False,
                 noise=self.noise[numbers], given=given)
        for r, number in zip(rows, numbers.tolist(), strict=True):
            self.number[r], self.seen[r] = number, 0

    def put(self, rows, **values):
        """Writes into these rows of the buffers: tensors (k, 1 or L), or numbers."""
        rows = self.on_device(rows)
        for name, x in values.items():
            buffer = self.decoder.row[name]
            if torch.is_tensor(x):
                buffer[rows, : x.shape[1]] = self.on_device(x).to(buffer.dtype)
            else:
                buffer.index_fill_(0, rows, x)

    def on_device(self, x):
        return torch.as_tensor(x).to(self.prompt.device, non_blocking=True)

    def rounded(self, columns):
        return -(-columns // COLUMNS) * COLUMNS

    def width(self):
        """Columns of the caches that the next steps can come to."""
        return min(self.rounded(self.prompt.shape[1] + max(self.seen) + LOOK), self.decoder.sizes[1])

    def look(self):
        """Takes rows that have ended out of the batch, and lets the environment answer."""
        row = {name: x[: self.n] for name, x in self.decoder.row.items()}
        state = torch.cat([row["t"], row["live"], row["ended"]], 1).tolist()         # the one wait of these steps
        heard = self.turns is not None or self.stop.sequences
        written = {name: row[name].cpu() for name in ("target", "drawn")} if heard else None
        over, answered = {}, []
        for r, (t, _, ended) in enumerate(state):
            if self.number[r] is None:
                continue
            if self.stop.sequences:
                t, ended = self.earliest_end(r, t, ended, written)
            self.seen[r] = t
            if ended and self.turns is not None:
                ended = self.turns.ends(self.number[r], written["target"][r, :t].tolist())
                if not ended and t < self.noise.shape[1]:
                    answered.append(r)
            if ended or t == self.noise.shape[1]:
                over[r] = ended
        if self.bits:
            self.collect(row)
        if answered:
            t = torch.tensor([self.seen[r] for r in answered])[:, None]
            numbers = torch.tensor([self.number[r] for r in answered])
            self.put(answered, live=True, ended=False, t=t, token=written["target"][answered].gather(1, t - 1),
                     given=self.turns.given[numbers])
        if over:
            self.finish(row, over)

    def earliest_end(self, r, t, ended, written):
        """The column behind the first token since the last look that ends a turn of row r, and whether there is one."""
        first, target = self.seen[r], written["target"][r : r + 1, :t]
        begin = 0 if self.turns is None else self.turns.episodes[self.number[r]].turns[-1]
        ends = self.stop(target, first, [begin])[0] & written["drawn"][r, first:t]   # (t - first,)
        return (first + int(ends.nonzero()[0]) + 1, True) if ends.any() else (t, ended)

    def collect(self, row):
        """Takes over the kept tokens of the last steps."""
        place, seen = row["place"].cpu(), torch.tensor(self.seen)[:, None]           # (n, LOOK), (n, 1)
        number = torch.tensor([-1 if number is None else number for number in self.number])
        V = self.decoder.model.vocabulary
        for drawn in ((place >= 0) & (place < seen)).nonzero().split(rows_at_once(V, self.prompt.device)):
            rows, slots = drawn.unbind(1)                                            # (k,) each
            mask = as_mask(row["kept"][self.on_device(rows), self.on_device(slots)], V)
            self.collector.add(number[rows] * self.noise.shape[1] + place[rows, slots], KeptTokens.of(mask))

    def finish(self, row, over):
        """Takes rows out of the batch. over: {row: whether its completion has an end}"""
        rows, L = list(over), self.noise.shape[1]
        numbers = [self.number[r] for r in rows]
        t = torch.tensor([self.seen[r] for r in rows])[:, None]                      # (k, 1)
        real = self.on_device(torch.arange(L) < t)                                   # (k, L)
        to, place = self.on_device(numbers), self.on_device(rows)
        for name, x in self.out.items():
            x[to] = row[name][place, :L] * real
        self.truncated[numbers] = ~torch.tensor(list(over.values()), dtype=torch.bool)
        self.longest = max(self.longest, int(t.max()))
        self.put(rows, **FREE)
        for r in rows:
            self.number[r], self.seen[r] = None, 0

    def narrow(self):
        """Halves the batch, as often as the completions that are left fit into it."""
        rows = [r for r, number in enumerate(self.number) if number is not None]
        before = self.n
        while self.begun == len(self.noise) and ROWS < self.n and 2 * len(rows) <= self.n:
            self.n //= 2
        if self.n == before or not rows:
            return
        rows += [r for r, number in enumerate(self.number) if number is None][: self.n - len(rows)]
        index = self.on_device(rows)
        for x in [*self.decoder.row.values(), *(x for pair in self.decoder.layers for x in pair)]:
            x[: self.n] = x[index]
        self.number, self.seen = [self.number[r] for r in rows], [self.seen[r] for r in rows]

    def generation(self):
        """The Generation, whose longest completion has M tokens."""
        target, logp, drawn = (x[:, : self.longest] for x in self.out.values())
        kept = self.collector.joined()
        return Generation(target, drawn.float(), logp, kept, self.on_device(self.truncated))
