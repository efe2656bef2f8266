"""Decodes completions on a GPU with CUDA graphs, in a fixed-shape batch that refills finished rows.

The result equals core.generation.generate's. The Decoder runs on the device: buffers, one step, its CUDA graphs. The
Scheduler runs on the host: it tracks which completion each row writes, which come next, and which have ended.
"""

import math
import sys
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from core.cache import RowCache, new_cache
from core.distributions import LARGE_VOCABULARY, KeptCollector, KeptTokens, draw_tokens, rows_at_once
from core.errors import one_line
from core.generation import Generation
from core.performance.sharding import has_parts

POLL_STEPS = 16  # steps between two polls
ROWS = 8         # a batch is never halved below this size
COLUMNS = 256    # cache widths are multiples of this, because each width needs its own graphs
REFILL = 1 / 8   # free rows are refilled once they make up this share of the batch


def can_decode(model):
    """True if a Decoder can run this language model: it is not sharded and can read through a RowCache."""
    return not has_parts(model) and model.reads_columns


class Sizes(NamedTuple):
    """The sizes of the buffers."""
    rows: int = 0         # in the batch
    columns: int = 0      # in a cache
    completions: int = 0  # in a call
    tokens: int = 0       # in a completion, at most
    vocabulary: int = 0   # 0 without truncation


class RowBuffers(NamedTuple):
    """The state of each row of the batch, (n, 1) each except the last two. CUDA graphs store the addresses of these
    tensors, so they are written in place and never replaced."""
    number: Tensor   # index of the completion, -1 for none
    token: Tensor    # the token to read next
    t: Tensor        # the column of the completion that the next step draws
    padding: Tensor  # leading columns of the cache without a token
    recent: Tensor   # (n, POLL_STEPS) ring buffer of the last tokens: column t is at t % POLL_STEPS
    kept: Tensor     # (n, POLL_STEPS, V) bool: the tokens that truncation kept at each of these columns


class CompletionBuffers(NamedTuple):
    """Inputs and outputs of a call for each completion, (N + 1, L + 1) each.

    Rows without a completion write to the extra row; rows past L tokens, to the extra column. Neither is ever read.
    """
    given: Tensor  # tokens of the environment's answers, -1 where the policy writes
    logp: Tensor   # float32: log-probability of the drawn token
    noise: Tensor  # float64 in [0, 1)


class Decoder:
    """Decodes completions with one model. Buffers and graphs persist across calls.

    row, completion: RowBuffers and CompletionBuffers
    caches: the keys of layer 0, its values, the keys of layer 1, and so on; (rows, H, columns, D) each
    prompt, padding: arguments of the current call; start: (1,) the cache column of the last prompt token
    graphs: {arguments of a step: function that runs it}; captures: False once capturing a step has failed
    cast: {(linear layer, "weight" or "bias"): this parameter in the precision of autocast}
    """

    def __init__(self, model):
        self.model = model
        self.cast = {}
        self.captures = True
        self.free_buffers()

    def free_buffers(self):
        """Frees the buffers and the graphs, which use them."""
        self.sizes = Sizes()
        self.row = self.completion = self.pool = None
        self.caches = []
        self.graphs = {}

    @torch.no_grad()
    def __call__(
            self,
            prompt,
            padding,
            uniform,
            stop,
            turns=None,
            rows=ROWS,
            **sampling):
        """Returns the same Generation as core.generation.generate. rows: the maximum number of rows in the batch"""
        self.device = prompt.device
        self.prompt = prompt
        self.padding = padding
        vocabulary = 0
        truncates = sampling.get("top_p", 1) < 1 or sampling.get("top_k") or sampling.get("min_p")
        if truncates and sampling.get("top_k") != 1:
            vocabulary = self.model.vocabulary
        scheduler = Scheduler(
            self,
            uniform.shape,
            stop,
            turns,
            rows,
            vocabulary)
        self.begin(scheduler.sizes, uniform.flatten(0, 1))
        with self.cast_weights():
            while scheduler.refill():
                width = scheduler.width()
                self.steps(scheduler.in_part, scheduler.n, width, scheduler.L, **sampling)
                scheduler.poll()
                scheduler.shrink()
        return scheduler.generation()

    @contextmanager
    def cast_weights(self):
        """Within the block, linear layers hold their weights and biases in the precision of autocast, which would
        otherwise cast them again for each token. The products are the same."""
        kind = self.device.type
        is_on = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind)
        own = {}
        for layer in self.model.modules():
            if is_on and isinstance(layer, nn.Linear) and layer.weight.dtype == torch.float32:
                own[layer, "weight"] = layer.weight
                if layer.bias is not None and type(layer) is nn.Linear:  # subclasses may add their bias in float32
                    own[layer, "bias"] = layer.bias
        try:
            for place, x in own.items():
                if place not in self.cast:
                    cast = x.to(dtype)
                    self.cast[place] = nn.Parameter(cast, requires_grad=False)
                # Training changes the weight between calls. The cast is updated in place: graphs hold its address
                self.cast[place].copy_(x)
                setattr(*place, self.cast[place])
            # No autocast cache: it is freed at the end of the block, but graphs would still use its tensors
            with torch.autocast(kind, dtype, is_on, cache_enabled=False):
                yield
        finally:
            for place, x in own.items():
                setattr(*place, x)

    def on_device(self, x):
        return torch.as_tensor(x).to(self.device, non_blocking=True)

    def begin(self, sizes, noise):
        """Clears the buffers for a call, and enlarges them if needed. sizes: the sizes of the call; noise: (N, L)"""
        larger = [max(old, new) for old, new in zip(self.sizes, sizes)]
        sizes = Sizes(*larger)
        if sizes != self.sizes:
            self.free_buffers()  # first, because memory may not hold both old and new buffers
            self.allocate(sizes)
        # Columns that no row reads must be cleared too: attention multiplies them by 0, and NaN from an earlier call
        # would stay NaN. `assign` fills completion.given
        for x in (*self.row, *self.caches, *self.completion):
            x.zero_()
        self.row.number.fill_(-1)
        N, L = noise.shape
        self.completion.noise[:N, :L] = self.on_device(noise)
        self.start.fill_(self.prompt.shape[1] - 1)  # the first step reads the last token of a prompt

    def allocate(self, sizes):
        """Allocates all buffers except the caches. `prefill` allocates the caches once it knows the shapes of keys and
        values."""
        self.sizes = sizes
        zeros = partial(torch.zeros, dtype=torch.long, device=self.device)
        column = (sizes.rows, 1)
        ring = (sizes.rows, POLL_STEPS)
        self.row = RowBuffers(
            number=zeros(column),
            token=zeros(column),
            t=zeros(column),
            padding=zeros(column),
            recent=zeros(ring),
            kept=zeros(*ring, sizes.vocabulary, dtype=torch.bool))
        table = (sizes.completions + 1, sizes.tokens + 1)
        self.completion = CompletionBuffers(
            given=zeros(table),
            logp=zeros(table, dtype=torch.float32),
            noise=zeros(table, dtype=torch.float64))
        self.start = zeros(1)

    def prefill(self, places, given, problems):
        """Fills the caches of rows with their prompts, except the last token, and assigns completions to the rows. Each
        prompt is read once.

        places, given: as in assign; problems: (k,) the prompt of each row, in ascending order without gaps
        """
        first = problems[0]
        end = problems[-1] + 1
        places = self.on_device(places)
        rows = places[:, 0]
        which = self.on_device(problems) - first                                     # (k,) among the p prompts
        prompt = self.prompt[first:end]                                              # (p, T)
        padding = None
        if self.padding is not None:
            padding = self.padding[first:end]                                        # (p,)
            self.row.padding[rows, 0] = padding[which]
        past = new_cache(self.model)
        self.model.states(prompt[:, :-1], None, past, padding)
        read = []                                                                    # (p, H, T - 1, D) each
        for keys_and_values in past.layers:
            read += keys_and_values
        if not self.caches:
            for x in read:
                _, H, _, D = x.shape
                cache = x.new_zeros(self.sizes.rows, H, self.sizes.columns, D)
                self.caches.append(cache)
        for x, cache in zip(read, self.caches):
            cache[rows, :, : x.shape[2]] = x[which]
        self.assign(places, given, prompt[which, -1])

    def assign(self, places, given, token):
        """Assigns completions to rows.

        places: (k, 3) row, completion and the column to draw next; token: (k,) the last token before that column
        given: (k, L) as in CompletionBuffers
        """
        rows, number, t = self.on_device(places).unbind(1)                           # (k,) each
        self.row.number[rows, 0] = number
        self.row.token[rows, 0] = self.on_device(token)
        self.row.t[rows, 0] = t
        L = given.shape[1]
        self.completion.given[number, :L] = self.on_device(given)

    def steps(self, in_part, *shape, **sampling):
        """Runs POLL_STEPS steps with the given arguments of `step`. in_part does not apply to the first, in which every
        row gets a token."""
        new = {}
        # Only a nucleus is sought in the top part: min_p sorts nothing, and of equally likely tokens topk would take
        # others from it than from the whole vocabulary
        has_nucleus = sampling.get("top_p", 1) < 1 and not sampling.get("top_k")
        in_part = in_part and has_nucleus
        for i in range(POLL_STEPS):
            kind = in_part and i > 0
            arguments = (kind, *shape, *sampling.items())
            step = self.graphs.get(arguments)
            if step is None:
                step = new.setdefault(arguments, partial(self.step, kind, *shape, **sampling))
            step()
        for arguments, step in new.items():  # after the steps: a graph must not capture the one-time setup of kernels
            self.graphs[arguments] = self.captured(step)

    def step(self, in_part, n, width, L, **sampling):
        """Reads a token and draws the next one in each of the first n rows, without synchronising with the host.

        in_part: looks only at the top part of the vocabulary. A row whose kept tokens may exceed it waits: it reads the
            same token again in the next step
        width: cache columns to read; L: maximum number of tokens in a completion
        """
        views = [x[:n] for x in self.row]
        row = RowBuffers(*views)
        completion = self.completion
        place = (row.number, row.t)                                                  # (n, 1) each
        # Shapes are fixed, so a finished row keeps drawing until it is refilled; the clamp keeps it within the cache
        last = min(width, self.model.longest_input) - 1
        column = (self.start + row.t).clamp(max=last)                                # (n, 1) of the cache
        caches = [x[:n, :, :width] for x in self.caches]
        keys = caches[::2]
        values = caches[1::2]
        layers = list(zip(keys, values))
        past = RowCache(layers, column=column)
        padding = row.padding[:, 0]                                                  # (n,)
        h = self.model.states(row.token, None, past, padding)[:, 0]                  # (n, C)
        noise = completion.noise[place]                                              # (n, 1)
        token, logp, kept = draw_tokens(self.model, h, noise, as_mask=True, in_part=in_part, **sampling)
        given = completion.given[place]                                              # (n, 1)
        is_drawn = given < 0
        token = torch.where(is_drawn, token, given)
        slot = row.t % POLL_STEPS                                                    # (n, 1)
        row.recent.scatter_(1, slot, token)
        if kept is not None:
            rows = torch.arange(n, device=self.device)[:, None]                      # (n, 1)
            row.kept[rows, slot] = kept[:, None]                                     # (n, 1, V)
        completion.logp[place] = logp
        advances = 1
        if in_part:
            waits = is_drawn & logp.isnan()                                          # (n, 1)
            token = torch.where(waits, row.token, token)
            advances = ~waits
        row.token.copy_(token)
        row.t.add_(advances).clamp_(max=L)

    def captured(self, step):
        """Captures step() as a CUDA graph on a GPU. Returns a function that replays the graph, or `step` if there is no
        graph. All graphs share memory for intermediate results, because a step stores its results in the buffers."""
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
    """Schedules one call of a Decoder on the host: N = P * G completions of at most L tokens.

    n: rows of the next steps; running: {row: its completion}; begun: number of completions started so far
    written: the tokens of each completion at the last poll; truncated: per completion, False once it has ended
    in_part: as in Decoder.steps; False once most rows have waited
    given: (N, L) as in CompletionBuffers, on the CPU; stop, turns: as in core.generation.generate
    """

    def __init__(
            self,
            decoder,
            shape,        # (P, G, L)
            stop,
            turns,
            rows,         # maximum rows in the batch
            vocabulary):  # 0 without truncation
        self.decoder = decoder
        self.stop = stop
        self.turns = turns
        P, self.group_size, self.L = shape
        self.N = P * self.group_size
        self.given = turns.given if turns else torch.full((self.N, self.L), -1)
        self.n = rows
        while self.n // 2 >= max(ROWS, self.N):  # only halvings of `rows`: each number of rows needs its own graphs
            self.n //= 2
        self.running = {}
        self.begun = 0
        self.written = [[] for _ in range(self.N)]
        self.truncated = [True] * self.N
        self.sizes = Sizes(
            rows=self.n,
            columns=self.columns(self.L),
            completions=self.N,
            tokens=self.L,
            vocabulary=vocabulary)
        self.in_part = vocabulary >= LARGE_VOCABULARY
        self.collector = KeptCollector()

    def columns(self, tokens):
        """Returns the cache columns for a prompt and this many tokens, rounded up to a multiple of COLUMNS."""
        needed = self.decoder.prompt.shape[1] + tokens
        return math.ceil(needed / COLUMNS) * COLUMNS

    def width(self):
        """Returns the number of cache columns that the next steps can reach."""
        longest = max(len(self.written[number]) for number in self.running.values())
        reached = self.columns(longest + POLL_STEPS)
        return min(reached, self.decoder.sizes.columns)

    def free(self):
        """Returns the rows without a completion."""
        return [row for row in range(self.n) if row not in self.running]

    def refill(self):
        """Gives the next completions to the free rows, once enough rows are free. Returns True if any row has a
        completion. Completions of the same prompt are consecutive, so that it is read once for all of them."""
        free = self.free()
        rows = free[: self.N - self.begun]
        if rows and len(free) >= REFILL * self.n:
            end = self.begun + len(rows)
            numbers = range(self.begun, end)
            problems = [number // self.group_size for number in numbers]
            places = [(row, number, 0) for row, number in zip(rows, numbers)]
            given = self.given[self.begun : end]                                     # (k, L)
            self.decoder.prefill(places, given, problems)
            self.running.update(zip(rows, numbers))
            self.begun = end
        return bool(self.running)

    def poll(self):
        """Appends the tokens of the last steps to their completions, lets the environment answer finished turns, and
        frees the rows of finished completions. Free rows keep drawing until they are refilled."""
        buffers = self.decoder.row
        state = torch.cat((buffers.t, buffers.recent), 1)                            # (rows, 1 + POLL_STEPS)
        state = state[: self.n].tolist()  # the only wait for the device in these steps
        new = []
        possible = 0
        advanced = 0
        for row, number in list(self.running.items()):
            written = self.written[number]
            first = len(written)
            slot = first % POLL_STEPS
            t, *ring = state[row]
            tokens = ring[slot:] + ring[:slot]  # from column `first` on
            written += tokens[: t - first]
            possible += min(POLL_STEPS, self.L - first)
            advanced += t - first
            ended = self.cut_at_end(number, first)
            if self.sizes.vocabulary:
                new += [(row, number, column) for column in range(first, len(written))]
            if ended and self.turns:
                ended = self.turns.answer_turn(number, written)
                if not ended:  # the row continues after the answer
                    place = (row, number, len(written))
                    given = self.given[number][None]                                 # (1, L)
                    self.decoder.assign([place], given, written[-1:])
            if ended or len(written) == self.L:
                self.truncated[number] = not ended
                del self.running[row]
        # If rows advance by less than a third of the steps, sorting all tokens in each step is faster than waiting
        self.in_part = self.in_part and 3 * advanced > possible
        if self.sizes.vocabulary:
            self.collect(torch.tensor(new))

    def cut_at_end(self, number, first):
        """Cuts a completion after the first new token that ends it or its current turn. Returns True if there is such a
        token; tokens of the environment's answers do not count. first: the column of the first new token"""
        written = self.written[number]
        if self.stop.sequences:
            turn = 0  # the column in which the current turn begins
            if self.turns:
                turn = self.turns.episodes[number].turns[-1]
            tokens = torch.tensor([written])                                         # (1, t)
            ends = self.stop(tokens, first, [turn])                                  # (1, t - first)
            ends = ends[0].tolist()
        else:
            ends = [token in self.stop.ids for token in written[first:]]
        for column, is_end in enumerate(ends, first):
            if is_end and self.given[number, column] < 0:
                del written[column + 1 :]
                return True
        return False

    def collect(self, new):
        """Collects the tokens that truncation kept. new: (k, 3) row, completion and column of each new token"""
        decoder = self.decoder
        _, number, column = new.unbind(1)                                            # (k,) each
        is_drawn = self.given[number, column] < 0
        new = new[is_drawn]
        size = rows_at_once(self.sizes.vocabulary, decoder.device)
        for part in new.split(size):
            row, number, column = decoder.on_device(part).unbind(1)
            kept = decoder.row.kept[row, column % POLL_STEPS]                        # (k, V)
            rank = number * self.L + column                                          # (k,) in (N, L), flattened
            self.collector.add(rank.cpu(), KeptTokens.of(kept))

    def shrink(self):
        """Halves the batch once the remaining completions fit into half of it."""
        half = self.n // 2
        used = list(self.running)
        if self.begun == self.N and ROWS <= half and 0 < len(used) <= half:
            rows = used + self.free()
            self.decoder.shrink(rows[:half])
            self.running = dict(enumerate(self.running.values()))  # row used[i] moved to row i
            self.n = half

    def generation(self):
        """Returns the Generation. M is the length of the longest completion."""
        tokens = [torch.tensor(written) for written in self.written]
        target = pad_sequence(tokens, batch_first=True, padding_value=-1)            # (N, M)
        N, M = target.shape
        is_own = (target >= 0) & (self.given[:, :M] < 0)                             # (N, M)
        on_device = self.decoder.on_device
        target = target.clamp(min=0)
        is_own = on_device(is_own)
        logp = self.decoder.completion.logp[:N, :M]
        logp = logp.masked_fill(~is_own, 0)  # where a row waited it is NaN
        kept = self.collector.joined()
        return Generation(
            target=on_device(target),
            mask=is_own.float(),
            logp=logp,
            kept=kept,
            truncated=on_device(self.truncated))
