"""Decodes completions on a GPU with CUDA graphs, in a batch of fixed shape whose finished rows are refilled.

The result is that of core.generation.generate. The Decoder is the device half: buffers, one step, its CUDA graphs. The
Scheduler is the host half: it knows which completion each row has, which ones come next, and which have ended.
"""

import math
import sys
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from core.cache import RowCache, new_cache
from core.distributions import KeptCollector, KeptTokens, draw_tokens, rows_at_once
from core.errors import one_line
from core.generation import Generation
from core.performance.sharding import has_parts

POLL_STEPS = 16  # steps between two polls
ROWS = 8         # a batch is not halved below this
COLUMNS = 256    # the number of columns of a cache is a multiple of this
REFILL = 1 / 8   # share of the batch that has ended when it is refilled


def can_decode(model):
    """Tells whether a Decoder can run a language model: it is not sharded, and its layers cache all tokens."""
    return not has_parts(model) and model.reads_columns


class Sizes(NamedTuple):
    """The sizes of the buffers."""
    rows: int = 0         # of the batch
    columns: int = 0      # of a cache
    completions: int = 0  # of a call
    tokens: int = 0       # of a completion
    vocabulary: int = 0   # 0 without truncation


class RowBuffers(NamedTuple):
    """The state of each row of the batch, (n, 1) each except the last two. CUDA graphs hold these addresses, so the
    tensors are written in place and never replaced."""
    number: Tensor   # the completion, -1 for none
    token: Tensor    # the token to read next
    t: Tensor        # the column of the completion that the next step draws
    padding: Tensor  # columns of the cache without a token
    recent: Tensor   # (n, POLL_STEPS) the last tokens, of column t at t % POLL_STEPS
    kept: Tensor     # (n, POLL_STEPS, V) bool: the tokens that could be drawn there


class CompletionBuffers(NamedTuple):
    """The input and output of a call for each completion, (N + 1, L + 1) each. Rows keep writing past the end of their
    completion, and rows without a completion write to the last one: both are cut off."""
    given: Tensor  # tokens of answers, -1 where the policy writes
    logp: Tensor   # log-probability of the drawn token
    noise: Tensor  # float64 in [0, 1)


class Decoder:
    """Decodes completions with one model. Its buffers and graphs stay from call to call.

    row, completion: RowBuffers and CompletionBuffers
    caches: keys and values of each layer in turn, (rows, H, columns, D) each
    prompt, padding: those of the call; start: (1,) columns of the cache before its completions
    graphs: {arguments of a step: a function that takes it}; captures: False once a step could not be captured
    cast: {linear layer: its weights in the precision of autocast}
    """

    def __init__(self, model):
        self.model = model
        self.sizes = Sizes()
        self.cast = {}
        self.captures = True

    @torch.no_grad()
    def __call__(self, prompt, padding, uniform, stop, turns=None, rows=ROWS, **sampling):
        """Returns the Generation of core.generation.generate. rows: the most completions in the batch at a time"""
        self.device = prompt.device
        self.prompt = prompt
        self.padding = padding
        truncates = sampling.get("top_p", 1) < 1 or sampling.get("top_k") or sampling.get("min_p")
        vocabulary = self.model.vocabulary if truncates else 0
        scheduler = Scheduler(self, uniform.shape, stop, turns, rows, vocabulary)
        self.begin(scheduler.sizes, uniform.flatten(0, 1))
        with self.cast_weights():
            while scheduler.refill():
                self.steps(scheduler.n, scheduler.width(), scheduler.L, **sampling)
                scheduler.poll()
                scheduler.shrink()
        return scheduler.generation()

    @contextmanager
    def cast_weights(self):
        """In the block, linear layers hold their weights in the precision of autocast. Otherwise autocast would cast
        them again for each token; the products are the same."""
        kind = self.device.type
        casts = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        full = {}
        for layer in self.model.modules():
            if casts and isinstance(layer, nn.Linear) and layer.weight.dtype == torch.float32:
                full[layer] = layer.weight
        try:
            for layer, weight in full.items():
                if layer not in self.cast:
                    self.cast[layer] = nn.Parameter(weight.to(dtype), requires_grad=False)
                self.cast[layer].copy_(weight)
                layer.weight = self.cast[layer]
            # Autocast's own cache is off: a graph would hold tensors in it that are freed at the end of the block
            with torch.autocast(kind, dtype, casts, cache_enabled=False):
                yield
        finally:
            for layer, weight in full.items():
                layer.weight = weight

    def on_device(self, x):
        return torch.as_tensor(x).to(self.device, non_blocking=True)

    def begin(self, sizes, noise):
        """Empties the buffers for a call, and makes larger ones if need be. sizes: those of the call; noise: (N, L)"""
        sizes = Sizes(*map(max, self.sizes, sizes))
        if sizes != self.sizes:
            self.allocate(sizes)
        # Even columns that no row reads must not hold NaN of an earlier call: attention multiplies them by 0
        for x in (*self.row, *self.caches, *self.completion):
            x.zero_()
        N, L = noise.shape
        self.row.number.fill_(-1)
        self.completion.noise[:N, :L] = self.on_device(noise)
        self.start.fill_(self.prompt.shape[1] - 1)  # the last token of a prompt is read in the first step

    def allocate(self, sizes):
        """Makes buffers. Old ones and their graphs are freed first, because memory may not hold both."""
        self.row = self.completion = self.pool = None
        self.graphs = {}
        self.caches = []
        self.sizes = sizes
        zeros = partial(torch.zeros, dtype=torch.long, device=self.device)
        recent = zeros(sizes.rows, POLL_STEPS)
        kept = zeros(sizes.rows, POLL_STEPS, sizes.vocabulary, dtype=torch.bool)
        self.row = RowBuffers(*zeros(4, sizes.rows, 1), recent, kept)
        given = zeros(sizes.completions + 1, sizes.tokens + 1)
        self.completion = CompletionBuffers(given, given.float(), given.double())
        self.start = zeros(1)

    def prefill(self, places, given, problems):
        """Fills the caches of rows with their prompts, all but the last token, and assigns completions to the rows.
        Each prompt is read once.

        places, given: as in assign; problems: (k,) the prompt of each row, in ascending order
        """
        first = problems[0]
        part = slice(first, problems[-1] + 1)
        places = self.on_device(places)
        rows = places[:, 0]
        which = self.on_device(problems) - first                                     # (k,)
        prompt = self.prompt[part]                                                   # (p, T)
        padding = self.padding
        if padding is not None:
            padding = padding[part]                                                  # (p,)
            self.row.padding[rows, 0] = padding[which]
        past = new_cache(self.model)
        self.model.states(prompt[:, :-1], None, past, padding)
        read = list(chain(*past.layers))                                             # (p, H, T - 1, D) each
        if not self.caches:  # only now are the shapes of keys and values known
            for x in read:
                _, H, _, D = x.shape
                cache = x.new_zeros(self.sizes.rows, H, self.sizes.columns, D)
                self.caches.append(cache)
        for x, cache in zip(read, self.caches):
            cache[rows, :, : x.shape[2]] = x[which]
        self.assign(places, given, prompt[which, -1])

    def assign(self, places, given, token):
        """Assigns completions to rows.

        places: (k, 3) row, completion and the column to draw next; token: (k,) the tokens to read for it
        given: (k, L) as in CompletionBuffers
        """
        rows, number, t = self.on_device(places).unbind(1)                           # (k,) each
        self.row.number[rows, 0] = number
        self.row.token[rows, 0] = self.on_device(token)
        self.row.t[rows, 0] = t
        self.completion.given[number, : given.shape[1]] = self.on_device(given)

    def steps(self, *shape, **sampling):
        """Takes POLL_STEPS steps, with the arguments of `step`."""
        key = *shape, *sampling.items()
        step = self.graphs.get(key)
        is_new = step is None
        if is_new:
            step = partial(self.step, *shape, **sampling)
        for _ in range(POLL_STEPS):
            step()
        if is_new:  # these steps have warmed up what the graph will hold
            self.graphs[key] = self.captured(step)

    def step(self, n, width, L, **sampling):
        """Reads and draws a token in each of the first n rows. No value comes to the host.

        width: columns of the caches that are read; L: most tokens of a completion
        """
        row = RowBuffers(*(x[:n] for x in self.row))
        completion = self.completion
        place = row.number, row.t                                                    # (n, 1) each
        # Shapes are fixed, so a finished row keeps drawing until it is refilled; clamped, it stays within the cache
        last = min(width, self.model.longest_input) - 1
        column = (self.start + row.t).clamp(max=last)                                # (n, 1) of the cache
        caches = [x[:n, :, :width] for x in self.caches]
        layers = list(zip(caches[::2], caches[1::2]))
        past = RowCache(layers, column=column)
        padding = row.padding[:, 0]                                                  # (n,)
        h = self.model.states(row.token, None, past, padding)[:, 0]                  # (n, C)
        noise = completion.noise[place]                                              # (n, 1)
        token, logp, kept = draw_tokens(self.model, h, noise, as_mask=True, **sampling)
        given = completion.given[place]                                              # (n, 1)
        token = torch.where(given < 0, token, given)
        slot = row.t % POLL_STEPS                                                    # (n, 1)
        row.recent.scatter_(1, slot, token)
        if kept is not None:
            rows = torch.arange(n, device=self.device)[:, None]                      # (n, 1)
            row.kept[rows, slot] = kept[:, None]
        completion.logp[place] = logp
        row.token.copy_(token)
        row.t.add_(1).clamp_(max=L)

    def captured(self, step):
        """Returns a function that does what step() does: on a GPU, by launching a CUDA graph. All graphs share the
        memory of intermediate results, because results stay in the buffers."""
        if self.device.type != "cuda" or not self.captures:
            return step
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            # torch.cuda.graph leaves its own stream current when a capture fails; the outer block restores ours
            with torch.cuda.stream(torch.cuda.current_stream()):
                with torch.cuda.graph(graph, self.pool, capture_error_mode="thread_local"):
                    step()
        except RuntimeError as error:
            self.captures = False
            sys.stderr.write(f"sampling continues without CUDA graphs, more slowly: {one_line(error, 200)}\n")
            return step
        return graph.replay

    def shrink(self, rows):
        """Moves these rows to the front."""
        index = self.on_device(rows)
        for x in (*self.row, *self.caches):
            x[: len(rows)] = x[index]


class Scheduler:
    """The host's record of one call of a Decoder: N = P * G completions of at most L tokens.

    n: rows of the next steps; running: {row: its completion}; begun: completions that have had a row
    written: the tokens of each completion at the last poll; truncated: False where one has ended
    given: (N, L) as in CompletionBuffers, on the CPU
    """

    def __init__(self, decoder, shape, stop, turns, rows, vocabulary):
        self.decoder = decoder
        self.stop = stop
        self.turns = turns
        P, self.group_size, self.L = shape
        self.N = P * self.group_size
        self.given = torch.full((self.N, self.L), -1)
        if turns:
            self.given = turns.given
        self.n = rows
        while self.n // 2 >= max(ROWS, self.N):  # rows and its halves only: each number of rows has graphs of its own
            self.n //= 2
        self.running = {}
        self.begun = 0
        self.written = [[] for _ in range(self.N)]
        self.truncated = [True] * self.N
        columns = self.columns(self.L)
        self.sizes = Sizes(self.n, columns, self.N, self.L, vocabulary)
        self.collector = KeptCollector()

    def columns(self, tokens):
        """Columns of a cache for a prompt and this many tokens, a multiple of COLUMNS."""
        needed = self.decoder.prompt.shape[1] + tokens
        return math.ceil(needed / COLUMNS) * COLUMNS

    def width(self):
        """Columns of the caches that the next steps can reach."""
        longest = max(len(self.written[number]) for number in self.running.values())
        return min(self.columns(longest + POLL_STEPS), self.decoder.sizes.columns)

    def free(self):
        """The rows without a completion."""
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
        end = self.begun + len(rows)
        numbers = range(self.begun, end)
        problems = [number // self.group_size for number in numbers]
        places = [(row, number, 0) for row, number in zip(rows, numbers)]
        self.decoder.prefill(places, self.given[self.begun : end], problems)
        self.running |= zip(rows, numbers)
        self.begun = end

    def poll(self):
        """Appends the tokens of the last steps, drops finished completions from the batch, and lets the environment
        answer. The rows of finished completions keep drawing until they are refilled."""
        recent = self.decoder.row.recent[: self.n].tolist()  # the only wait for the device in these steps
        new = []
        for row, number in list(self.running.items()):
            written = self.written[number]
            first = len(written)
            slot = first % POLL_STEPS
            tokens = recent[row][slot:] + recent[row][:slot]
            written += tokens[: self.L - first]
            ended = self.cut_at_end(number, first)
            new += [(row, number, column) for column in range(first, len(written))]
            if ended and self.turns:
                ended = self.turns.answer_turn(number, written)
                if not ended:
                    places = [(row, number, len(written))]
                    self.decoder.assign(places, self.given[number, None], written[-1:])
            if ended or len(written) == self.L:
                self.truncated[number] = not ended
                del self.running[row]
        if self.sizes.vocabulary:
            self.collect(torch.tensor(new))

    def cut_at_end(self, number, first):
        """Cuts a completion after its first new token that ends it, or a turn of it, and returns whether there is one.
        Tokens of answers end nothing. first: the column of the first new token"""
        written = self.written[number]
        if self.stop.sequences:
            turn = self.turns.episodes[number].turns[-1] if self.turns else 0
            tokens = torch.tensor([written])                                         # (1, t)
            ends, = self.stop(tokens, first, [turn]).tolist()
        else:
            ends = [token in self.stop.ids for token in written[first:]]
        for column, is_end in enumerate(ends, first):
            if is_end and self.given[number, column] < 0:
                del written[column + 1 :]
                return True
        return False

    def collect(self, new):
        """Collects the kept tokens of the last steps. new: (k, 3) row, completion and column of each token"""
        decoder = self.decoder
        _, number, column = new.unbind(1)                                            # (k,) each
        new = new[self.given[number, column] < 0]
        for part in new.split(rows_at_once(self.sizes.vocabulary, decoder.device)):
            row, _, column = decoder.on_device(part).unbind(1)
            kept = KeptTokens.of(decoder.row.kept[row, column % POLL_STEPS])
            place = part[:, 1] * self.L + part[:, 2]                                 # (k,) in (N, L), flattened
            self.collector.add(place, kept)

    def shrink(self):
        """Halves the batch once the remaining completions fit into half of it. Few sizes, because each has its own
        graphs."""
        half = self.n // 2
        used = list(self.running)
        if self.begun == self.N and ROWS <= half and 0 < len(used) <= half:
            rows = used + self.free()
            self.decoder.shrink(rows[:half])
            self.running = dict(enumerate(self.running.values()))
            self.n = half

    def generation(self):
        """Returns the Generation, whose longest completion has M tokens."""
        tokens = [torch.tensor(written) for written in self.written]
        target = pad_sequence(tokens, batch_first=True, padding_value=-1)            # (N, M)
        N, M = target.shape
        is_own = (target >= 0) & (self.given[:, :M] < 0)                             # (N, M)
        on_device = self.decoder.on_device
        mask = on_device(is_own).float()
        logp = self.decoder.completion.logp[:N, :M] * mask
        return Generation(
            on_device(target.clamp(min=0)), mask, logp,
            kept=self.collector.joined(),
            truncated=on_device(self.truncated))
