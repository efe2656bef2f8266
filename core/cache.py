"""The KV cache: keys and values of earlier tokens, and of the prompt that a group shares."""

import torch
from torch.nn import functional as F

from core.model import attend, attention_mask

UNORDERED = ("cuda",)  # devices on which index_select adds gradients up in any order, and in their own precision
SHARE_FROM = 2**16  # numbers in a layer's keys, copied for each row, from which sharing the prompts' keys is faster


def new_cache(model):
    """An empty cache of the kind that a model reads through."""
    return model.new_cache() if hasattr(model, "new_cache") else Cache()


def at_rows(x, rows):
    """x (B, ...) at rows (n,) of it. The gradients of equal rows are added up in one order; on a GPU in float32."""
    if x.device.type in UNORDERED and x.requires_grad:
        return x.float()[rows].to(x.dtype)
    return x.index_select(0, rows)


class Cache:
    """Keys and values of the tokens that the rows of a batch have read so far, so that no token is read twice.

    In generation new columns are written in place, into room that `expand` reserves. In training the prompt that a
    group shares is read once, and gradients flow back through its keys and values.
    """

    def __init__(self, layers=(), length=0, room=0):
        self.layers = list(layers)          # (keys, values) of each layer, (B, H, length + room, D) each
        self.length = length
        self.room = room

    def mask(self, T, padding, device):
        """The mask of the next T tokens, for the functions of `layer`. padding: (B,) or None."""
        return attention_mask(self.length, T, padding, device)

    def layer(self, i):
        """The attention of layer i: a function of queries, keys and values (B, H, T, D) of new tokens, which read them
        and all tokens before them."""
        before = self.layers[i] if i < len(self.layers) else None  # grad_checkpoint calls the function a second time

        def read(q, k, v, mask, *settings):
            k, v = self.add(i, before, k, v)                                         # (B, H, L, D) each
            return attend(q, k, v, mask, *settings)
        return read

    def add(self, i, before, k, v):
        """Adds keys and values of new tokens to layer i, which held `before`. Returns those of all tokens."""
        if before is None:
            self.layers[i:] = [(k, v)]
            return k, v
        pairs = zip(before, (k, v), strict=True)
        if not self.room:
            self.layers[i] = [torch.cat(pair, 2) for pair in pairs]
            return self.layers[i]
        end = self.length + k.shape[2]
        for old, new in pairs:
            old[:, :, self.length : end] = new
        return [x[:, :, :end] for x in before]

    def expand(self, rows, room=0):
        """A new cache whose row i continues row rows[i] of this one, which stays as it is. Gradients flow back to it.

        rows: (n,) indices; room: columns for tokens that are written in place, one at a time, without gradients
        """
        k = self.layers[0][0]                                                        # (B, H, length, D)
        large = len(rows) * k[0].numel() >= SHARE_FROM
        on_cpu = k.device.type == "cpu" and k.dtype == torch.float32  # its attention has no fused kernel
        if room and large and on_cpu:
            nothing = k.new_empty(len(rows), k.shape[1], room, k.shape[3])
            own = [[torch.empty_like(nothing) for _ in pair] for pair in self.layers]
            return SharedCache(self, rows, Cache(own, room=room))
        layers = []
        for pair in self.layers:
            pair = [at_rows(x, rows) for x in pair]                                  # (n, H, length, D) each
            if room:
                pair = [F.pad(x, (0, 0, 0, room)) for x in pair]
            layers.append(pair)
        return Cache(layers, self.length, room)

    def keep(self, rows):
        """Drops all rows but these. What remains moves forward in place, so that rows that stay where they are cost
        nothing. rows: (n,) indices, each at most once"""
        stays = rows == torch.arange(len(rows), device=rows.device)
        to = (~stays).nonzero().squeeze(1)
        for i, pair in enumerate(self.layers):
            for x in pair:
                x[to, :, : self.length] = x[rows[to], :, : self.length]
            self.layers[i] = [x[: len(rows)] for x in pair]


class RowCache:
    """A Cache in buffers that stay where they are, of rows that have come to different columns. Each reads one token.

    layers: [(keys, values)] of each layer, (n, H, L, D); column: (n, 1) where each row's token is
    """

    length = 0  # of no use: each row has its own

    def __init__(self, layers, column):
        self.layers, self.column = layers, column

    def mask(self, T, padding, device):
        """(n, 1, 1, L) bool: the columns that each row reads. padding: (n,)"""
        place = torch.arange(self.layers[0][0].shape[2], device=device)              # (L,)
        return ((place <= self.column) & (place >= padding[:, None]))[:, None, None]

    def add(self, i, k, v):
        """Writes keys and values (n, H, 1, D) into layer i. Returns those of all columns."""
        for buffer, new in zip(self.layers[i], (k, v), strict=True):
            buffer.scatter_(2, self.column[:, None, None].expand_as(new), new.to(buffer.dtype))
        return self.layers[i]

    def layer(self, i):
        """Like Cache.layer, for one new token of each row."""
        return lambda q, k, v, mask, *settings: attend(q, *self.add(i, k, v), mask, *settings)


class SharedCache:
    """A Cache for generation that holds the keys and values of each prompt once. All rows of a prompt read its keys in
    one product: a prompt has slots for the largest group."""

    def __init__(self, prompts, rows, own):
        """prompts: a Cache of P prompts; rows: (n,) the prompt that each row continues; own: an empty Cache for n rows,
        with room for their tokens"""
        self.start = prompts.length
        self.own = own
        self.prompts = [[x.contiguous() for x in pair] for pair in prompts.layers]   # (P, H, start, D) each
        self.assign_slots(rows)

    @property
    def length(self):
        return self.start + self.own.length

    @length.setter
    def length(self, length):
        self.own.length = length - self.start

    def assign_slots(self, prompt):
        """Gives every row a slot of its prompt, and drops prompts without rows. prompt: (n,) of each row"""
        used, self.prompt = prompt.unique(return_inverse=True)                       # (P,), (n,)
        if len(used) < len(self.prompts[0][0]):
            self.prompts = [[x.index_select(0, used) for x in pair] for pair in self.prompts]
        count = F.one_hot(self.prompt).cumsum(0)                                     # (n, P) rows up to each
        number = count.gather(1, self.prompt[:, None])[:, 0] - 1                     # (n,) of each row in its group
        S = int(number.max()) + 1
        self.slot_of_row = self.prompt * S + number                                  # (n,) in 0 .. P S - 1
        self.row_of_slot = prompt.new_zeros(len(used), S)                            # (P, S) 0 where there is none
        self.row_of_slot.view(-1)[self.slot_of_row] = torch.arange(len(prompt), device=prompt.device)

    def keep(self, rows):
        """Drops all rows but these."""
        self.own.keep(rows)
        self.assign_slots(self.prompt[rows])

    def mask(self, T, padding, device):
        """A term (P, 1, 1, start) for the attention scores of the prompts' columns, -inf at padding: (n,) or None."""
        assert T == 1, T
        if padding is None:
            return None
        first = padding[self.row_of_slot[:, 0]]                                      # (P,) column of each prompt
        column = torch.arange(self.start, device=device)                             # (start,)
        return torch.where(column < first[:, None, None, None], -torch.inf, 0.0)

    def layer(self, i):
        """Like Cache.layer, for one new token of each row."""
        def read(q, k, v, mask, *settings):
            prompt_k, prompt_v = self.prompts[i]                                     # (P, H, start, D) each
            k, v = self.own.add(i, self.own.layers[i], k, v)                         # (n, H, L, D) each
            q = q * q.shape[3] ** -0.5                                               # (n, H, 1, D)
            with torch.autocast(q.device.type, enabled=False):
                scores = self.by_prompt(q) @ prompt_k.mT                             # (P, H, S, start)
                if mask is not None:
                    scores += mask
                scores = torch.cat((self.by_row(scores), q @ k.mT), 3)               # (n, H, 1, start + L)
                weight = scores.softmax(3)
                of_prompt, of_own = weight.split([self.start, k.shape[2]], 3)
                from_prompt = self.by_prompt(of_prompt) @ prompt_v                   # (P, H, S, D)
                return self.by_row(from_prompt) + of_own @ v                         # (n, H, 1, D)
        return read

    def by_prompt(self, x):
        """The rows of each group together: (n, H, 1, X) -> (P, H, S, X)."""
        x = x.squeeze(2).index_select(0, self.row_of_slot.flatten())                 # (P S, H, X)
        return x.unflatten(0, self.row_of_slot.shape).transpose(1, 2)

    def by_row(self, x):
        """The inverse of by_prompt: (P, H, S, X) -> (n, H, 1, X)."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.slot_of_row)[:, :, None]
