"""Completes prompts on a GPU with CUDA graphs: in a batch of fixed shape, finished rows are refilled.

It writes what core.generation.generate writes. The Decoder is the half on the device: buffers, one step, its graphs.
The Scheduler is the half on the host: which completion a row has, which ones come next, and which have ended.
"""

import sys
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.cache import RowCache, new_cache
from core.device import ids_on
from core.distributions import KeptCollector, KeptTokens, draw_tokens, rows_at_once
from core.errors import one_line
from core.generation import Generation
from core.model import LANGUAGE_MODEL
from core.performance.sharding import has_parts

POLL_STEPS = 16  # steps between two polls
ROWS = 8         # rows of the smallest batch
COLUMNS = 256    # a cache has a multiple of so many columns
REFILL = 1 / 8   # share of the batch that has ended when it is filled again


def can_decode(model):
    """Tells whether a Decoder can run a model: it is whole, and each layer keeps the keys and values of all tokens."""
    whole = not any(map(has_parts, model.modules()))
    return whole and model.mode == LANGUAGE_MODEL and getattr(model, "reads_columns", True)


class Sizes(NamedTuple):
    """The room in the buffers."""
    rows: int = 0         # of the batch
    columns: int = 0      # of a cache
    completions: int = 0  # of a call
    tokens: int = 0       # of a completion
    vocabulary: int = 0   # tokens in it; 0 where truncation leaves none out


class RowBuffers(NamedTuple):
    """The state of each row of the batch, (n, 1) each. CUDA graphs hold these addresses, so the tensors are written in
    place and never replaced."""
    number: Tensor   # the completion, -1 for none
    token: Tensor    # the token to read next
    t: Tensor        # the column of the completion that the next step draws
    padding: Tensor  # columns of the cache without a token
    ended: Tensor    # bool: a stop token was drawn, or there is no completion


class OutputBuffers(NamedTuple):
    """The input and output of a call for each completion, (N + 1, L + 1) each. A row that has ended writes behind the
    end of its completion, one without a completion into the last row: both are cut off."""
    target: Tensor  # tokens
    given: Tensor   # tokens of answers, -1 where the policy writes
    logp: Tensor    # log-probability of the drawn token, of none where one is given
    noise: Tensor   # float64 in [0, 1)


class Decoder:
    """Decodes completions with one model. Its buffers and graphs stay from call to call.

    row, out: RowBuffers and OutputBuffers; caches: keys, values of each layer in turn, (rows, H, columns, D) each
    start: (1,) columns of the cache before the completions
    kept: (rows, POLL_STEPS, V) bool: the tokens that could be drawn, of column t at t % POLL_STEPS
    graphs: {arguments of a step: what does it}; captures: False once a step could not be captured
    cast: weights of linear layers in the precision of autocast
    """

    def __init__(self, model):
        self.model = model
        self.sizes = Sizes()
        self.cast = []
        self.captures = True

    @torch.no_grad()
    def __call__(self, prompt, padding, uniform, stop, turns=None, rows=ROWS, **sampling):
        """The Generation that core.generation.generate returns. rows: the most completions in the batch at a time"""
        self.device = prompt.device
        scheduler = Scheduler(self, prompt, padding, uniform.shape, stop, turns, rows, sampling)
        self.begin(scheduler.sizes, prompt.shape[1] - 1, uniform.flatten(0, 1))
        with self.cast_weights():
            while scheduler.refill():
                self.steps(scheduler.n, scheduler.width(), scheduler.L, stop.ids, **sampling)
                scheduler.poll()
                scheduler.shrink()
        return scheduler.generation()

    @contextmanager
    def cast_weights(self):
        """Within, linear layers have weights in the precision of autocast, which would cast them for each token. The
        products are those of training."""
        kind = self.device.type
        casts = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        layers = [layer for layer in self.model.modules() if isinstance(layer, nn.Linear)]
        layers = [layer for layer in layers if casts and layer.weight.dtype == torch.float32]
        full = [layer.weight for layer in layers]
        if len(self.cast) != len(full):
            self.cast = [nn.Parameter(weight.to(dtype), requires_grad=False) for weight in full]
        try:
            if full:
                torch._foreach_copy_(self.cast, full)
            for layer, weight in zip(layers, self.cast):
                layer.weight = weight
            with torch.autocast(kind, dtype, casts, cache_enabled=False):  # a graph would hold what is in its cache
                yield
        finally:
            for layer, weight in zip(layers, full):
                layer.weight = weight

    def on_device(self, x):
        return torch.as_tensor(x).to(self.device, non_blocking=True)

    def begin(self, sizes, start, noise):
        """Empties the buffers for the completions of a call, after making larger ones if need be.

        sizes: what the call needs room for; start: columns of the cache before the completions; noise: (N, L)
        """
        sizes = Sizes(*map(max, self.sizes, sizes))
        if sizes != self.sizes:
            self.allocate(sizes)
        for x in (*self.row, *self.caches, *self.out):
            x.zero_()  # NaN of an earlier call would spoil what reads other columns
        N, L = noise.shape
        self.row.number.fill_(-1)
        self.row.ended.fill_(True)
        self.out.given.fill_(-1)
        self.out.noise[:N, :L] = self.on_device(noise)
        self.start.fill_(start)

    def allocate(self, sizes):
        """Makes buffers. Old ones and their graphs go first, because memory may not hold both."""
        self.row = self.out = self.kept = self.pool = None
        self.graphs = {}
        self.caches = []
        self.sizes = sizes
        zeros = partial(torch.zeros, dtype=torch.long, device=self.device)
        numbers = zeros(4, sizes.rows, 1)
        self.row = RowBuffers(*numbers, ended=numbers[0].bool())
        target, given = zeros(2, sizes.completions + 1, sizes.tokens + 1)
        self.out = OutputBuffers(target, given, target.float(), target.double())
        self.start = zeros(1)
        self.kept = zeros(sizes.rows, POLL_STEPS, sizes.vocabulary, dtype=torch.bool)

    def prefill(self, places, prompt, padding, which):
        """Reads prompts (p, T), all but their last tokens, and lets rows complete prompts `which` (k,).

        places: as in assign; padding: (p,) or None
        """
        past = new_cache(self.model)
        self.model.states(prompt[:, :-1], None, past, padding)
        read = [x for pair in past.layers for x in pair]                             # (p, H, T - 1, D) each
        if not self.caches:  # now the shapes of keys and values are known
            for x in read:
                shape = self.sizes.rows, x.shape[1], self.sizes.columns, x.shape[3]
                self.caches.append(x.new_zeros(shape))
        places = self.on_device(places)
        which = self.on_device(which)
        rows = places[:, 0]
        for x, cache in zip(read, self.caches):
            cache[rows, :, : x.shape[2]] = x[which]
        if padding is not None:
            self.row.padding[rows, 0] = padding[which]
        self.assign(places, prompt[which, -1])

    def assign(self, places, token, given=None):
        """Lets rows write completions. places: (k, 3) row, completion and the column to draw after reading token (k,);
        given: (k, L) as in OutputBuffers, or None for what it holds"""
        rows, number, t = self.on_device(places).unbind(1)                           # (k,) each
        row = self.row
        row.number[rows, 0] = number
        row.token[rows, 0] = self.on_device(token)
        row.t[rows, 0] = t
        row.ended.index_fill_(0, rows, False)
        if given is not None:
            self.out.given[number, : given.shape[1]] = self.on_device(given)

    def steps(self, *shape, **sampling):
        """POLL_STEPS steps, with the arguments of `step`."""
        key = *shape, *sampling.items()
        step = self.graphs.get(key) or partial(self.step, *shape, **sampling)
        for _ in range(POLL_STEPS):
            step()
        if key not in self.graphs:  # the steps have warmed up what the graph will hold
            self.graphs[key] = self.captured(step)

    def step(self, n, width, L, stop_ids, **sampling):
        """Draws a token of each of the first n rows, whose caches have `width` columns, for completions of L tokens. No
        value comes to the host."""
        row = RowBuffers(*(x[:n] for x in self.row))
        out = self.out
        place = row.number, row.t                                                    # (n, 1) each
        live = ~row.ended & (row.t < L)  # others draw as well, because the shapes stay, but do not advance
        last = min(width, self.model.longest_input) - 1
        column = (self.start + row.t).clamp(max=last)  # of the cache; beyond its end in a row that is not live
        caches = [x[:n, :, :width] for x in self.caches]
        past = RowCache([*zip(caches[::2], caches[1::2])], column)
        padding = row.padding[:, 0]
        h = self.model.states(row.token, None, past, padding)[:, 0]                  # (n, C)
        noise = out.noise[place]                                                     # (n, 1)
        token, logp, kept = draw_tokens(self.model, h, noise, as_mask=True, **sampling)
        if kept is not None:
            rows = torch.arange(n, device=self.device)
            self.kept[rows, row.t[:, 0] % POLL_STEPS] = kept
        given = out.given[place]                                                     # (n, 1)
        is_own = given < 0
        token = torch.where(is_own, token, given)
        is_stop = (token == ids_on(self.device, *stop_ids)).any(1, True)
        out.target[place] = token
        out.logp[place] = logp
        row.token.copy_(token)
        row.ended.logical_or_(is_stop & is_own & live)
        row.t.add_(live)

    def captured(self, step):
        """A function that does what step() does: on a GPU, by launching a CUDA graph. All graphs share memory for what
        they compute on the way: what stays is in the buffers."""
        if self.device.type != "cuda" or not self.captures:
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

    def shrink(self, rows):
        """Moves these rows to the front."""
        index = self.on_device(rows)
        for x in (*self.row, *self.caches):
            x[: len(rows)] = x[index]


class Scheduler:
    """The N = P * G completions of one call of a Decoder, of L tokens at most, as the host knows them.

    n: rows that the next steps have; running: {row: the completion in it}; begun: completions that have had a row
    length: the columns of each completion at the last poll; truncated: False where one has ended; given: (N, L) as in
    OutputBuffers, on the CPU
    """

    def __init__(self, decoder, prompt, padding, shape, stop, turns, rows, sampling):
        self.decoder = decoder
        self.prompt = prompt
        self.padding = padding
        self.stop = stop
        self.turns = turns
        P, self.group_size, self.L = shape
        self.N = P * self.group_size
        nothing = torch.tensor(-1).expand(self.N, self.L)
        self.given = turns.given if turns else nothing
        while rows // 2 >= max(ROWS, self.N):  # few sizes, because each has its graphs
            rows //= 2
        self.n = rows
        self.running = {}
        self.begun = 0
        self.length = [0] * self.N
        self.truncated = [True] * self.N
        truncates = sampling.get("top_p", 1) < 1 or sampling.get("top_k") or sampling.get("min_p")
        vocabulary = decoder.model.vocabulary if truncates else 0
        self.sizes = Sizes(rows, self.columns(self.L), self.N, self.L, vocabulary)
        self.collector = KeptCollector()

    def columns(self, tokens):
        """Columns of a cache for a prompt and this many tokens, a multiple of COLUMNS."""
        return -(-(self.prompt.shape[1] + tokens) // COLUMNS) * COLUMNS

    def width(self):
        """Columns of the caches that the next steps can come to."""
        longest = max(self.length[number] for number in self.running.values())
        return min(self.columns(longest + POLL_STEPS), self.decoder.sizes.columns)

    def free(self):
        """Rows without a completion."""
        return [row for row in range(self.n) if row not in self.running]

    def refill(self):
        """Gives free rows the next completions, once there are enough of them. Returns whether any row has one."""
        free = self.free()
        rows = free[: self.N - self.begun]
        if rows and len(free) >= REFILL * self.n:
            self.prefill(rows)
        return bool(self.running)

    def prefill(self, rows):
        """Gives rows the next completions. Those of a prompt are neighbours, so that it is read once for all."""
        numbers = range(self.begun, self.begun + len(rows))
        problems = [number // self.group_size for number in numbers]
        first = problems[0]
        part = slice(first, problems[-1] + 1)
        padding = None if self.padding is None else self.padding[part]               # (p,)
        places = [(row, number, 0) for row, number in zip(rows, numbers)]
        which = [problem - first for problem in problems]
        self.decoder.prefill(places, self.prompt[part], padding, which)
        self.running |= zip(rows, numbers)
        self.begun = numbers.stop

    def poll(self):
        """Takes completions that have ended out of the batch, and lets the environment answer.

        The device does not learn of ends that the host finds: their rows write on, behind the end, until refilled.
        """
        state = self.decoder.row
        progress = torch.cat([state.t, state.ended], 1)[: self.n].tolist()           # the one wait of these steps
        if self.turns or self.stop.sequences:
            target = self.decoder.out.target.cpu()                                   # (N + 1, L + 1)
        new, answered = [], []
        for row, number in list(self.running.items()):
            t, ended = progress[row]
            first = self.length[number]
            if self.stop.sequences:
                t, ended = self.earliest_end(number, first, target[number, :t])
            new += [(row, number, column) for column in range(first, t)]
            self.length[number] = t
            ends_turn = ended and self.turns
            if ends_turn:
                ended = self.turns.ends(number, target[number, :t].tolist())
            if ended or t == self.L:
                self.truncated[number] = not ended
                del self.running[row]
            elif ends_turn:
                answered.append((row, number, t))
        if self.sizes.vocabulary:
            self.collect(torch.tensor(new))
        if answered:
            places = torch.tensor(answered)
            _, number, t = places.unbind(1)                                          # (k,) each
            self.decoder.assign(places, target[number, t - 1], self.given[number])

    def earliest_end(self, number, first, target):
        """The column behind the first new token that ends a turn of a completion, and True; or behind the last token,
        and False. target: (t,) tokens so far, new from `first` on"""
        begin = self.turns.episodes[number].turns[-1] if self.turns else 0
        ends = self.stop(target[None], first, [begin])[0]                            # (t - first,)
        is_own = self.given[number, first : len(target)] < 0
        columns = (ends & is_own).nonzero()
        if len(columns) == 0:
            return len(target), False
        return first + int(columns[0]) + 1, True

    def collect(self, new):
        """Takes over the kept tokens of the last steps. new: (k, 3) row, completion and column of each token"""
        decoder = self.decoder
        _, number, column = new.unbind(1)                                            # (k,) each
        new = new[self.given[number, column] < 0]
        for part in new.split(rows_at_once(self.sizes.vocabulary, decoder.device)):
            row, _, column = decoder.on_device(part).unbind(1)
            kept = KeptTokens.of(decoder.kept[row, column % POLL_STEPS])
            self.collector.add(part[:, 1] * self.L + part[:, 2], kept)

    def shrink(self):
        """Halves the batch if the completions that are left fit into it."""
        half = self.n // 2
        used = list(self.running)
        if self.begun == self.N and ROWS <= half and 0 < len(used) <= half:
            rows = used + self.free()
            self.decoder.shrink(rows[:half])
            self.running = dict(enumerate(self.running.values()))
            self.n = half

    def generation(self):
        """The Generation, whose longest completion has M tokens."""
        out, on_device = self.decoder.out, self.decoder.on_device
        M = max(self.length)
        is_real = on_device(torch.arange(M) < torch.tensor(self.length)[:, None])    # (N, M)

        def cut(x):
            return x[: self.N, :M] * is_real

        mask = cut(out.given < 0).float()
        logp = cut(out.logp) * mask
        kept = self.collector.joined()
        return Generation(cut(out.target), mask, logp, kept, on_device(self.truncated))
