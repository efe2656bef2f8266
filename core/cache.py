"""Keys and values of the tokens that were read before, and attention to them."""

import torch
from torch.nn import functional as F

SHARE_FROM = 2**16  # numbers in a layer's keys, copied for each row, from which sharing the prompts' keys is faster


def attend(q, k, v, mask=None, causal=False, dropout=0.0):
    """Attention in the precision of its inputs. q: (B, H, T, D); k, v: (B, H, L, D); mask: as attention_mask returns
    it. Returns (B, H, T, D)."""
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal and mask is None and q.shape[2] > 1,
                                              dropout_p=dropout)


def attention_mask(before, T, padding, causal, device):
    """Which of the before + T columns each of T new positions reads.

    padding: (B,) number of leading columns without a token, or None
    Returns (1 or B, 1, T, before + T) bool, or None where the kernel's own causal mask, or none, is right. Every
    position reads itself, so that no softmax is empty.
    """
    if padding is None and (before == 0 or T == 1):
        return None
    column, here = torch.arange(before + T, device=device), torch.arange(before, before + T, device=device)[:, None]
    seen = (column <= here if causal else torch.ones_like(column <= here))[None]     # (1, T, before + T)
    if padding is not None:
        seen = seen & (column >= padding[:, None, None]) | (column == here)          # (B, T, before + T)
    return seen[:, None]


class Cache:
    """Keys and values of the tokens that the rows of a batch have read so far, so that no token is read twice.

    In generation new columns are written in place, into room that `expand` reserves. In training the prompt that a
    group shares is read once, and gradients flow back through its keys and values.
    """

    def __init__(self):
        self.layers, self.length, self.room = [], 0, 0

    def mask(self, T, padding, device):
        """What the next T tokens read, for the functions of `layer`. padding: (B,) or None."""
        return attention_mask(self.length, T, padding, True, device)

    def layer(self, i):
        """The attention of layer i: a function of queries, keys and values (B, H, T, D) of new tokens, which read them
        and all tokens before them."""
        before = self.layers[i] if i < len(self.layers) else None  # grad_checkpoint calls the function a second time

        def read(q, k, v, mask, *settings):
            return attend(q, *self.extend(i, before, k, v), mask, *settings)
        return read

    def extend(self, i, before, k, v):
        """Adds keys and values of new tokens to layer i, which held `before`. Returns those of all tokens."""
        if before is None:
            self.layers[i:] = [(k, v)]
            return k, v
        if self.room:
            for whole, new in zip(before, (k, v), strict=True):
                whole[:, :, self.written : self.written + new.shape[2]] = new
            return tuple(x[:, :, : self.written + k.shape[2]] for x in before)
        self.layers[i] = tuple(torch.cat(pair, dim=2) for pair in zip(before, (k, v), strict=True))
        return self.layers[i]

    @property
    def written(self):
        """Number of columns of its tensors that hold keys and values."""
        return self.length

    def expand(self, rows, room=0):
        """A new Cache whose row i continues row rows[i] of this one, which stays as it is. Gradients flow back to it.

        rows: (n,) indices; room: columns for tokens that are written in place, one at a time, without gradients
        """
        k = self.layers[0][0]                                                        # (B, H, before, D)
        large = room and len(rows) * k[0].numel() >= SHARE_FROM
        if large and k.device.type == "cpu" and k.dtype == torch.float32:  # its attention has no fused kernel
            return SharedCache(self, rows, room)
        new = Cache()
        new.length, new.room = self.length, room
        for pair in self.layers:
            pair = tuple(x.index_select(0, rows) for x in pair)                      # (n, H, before, D) each
            new.layers.append(tuple(F.pad(x, (0, 0, 0, room)) for x in pair) if room else pair)
        return new

    def keep(self, rows):
        """Drops all rows but these. What remains moves forward in place, so that rows that stay where they are cost
        nothing. rows: (n,) indices, each at most once"""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        for i, pair in enumerate(self.layers):
            for x in pair:
                x[moved, :, : self.written] = x[rows[moved], :, : self.written]
            self.layers[i] = tuple(x[: len(rows)] for x in pair)


class SharedCache(Cache):
    """A cache for generation that holds the keys and values of each prompt once, whatever the number of rows that
    continue it, and those of each row's own tokens.

    The rows of a prompt are its group. All queries of a group read the prompt's keys in one product, so each prompt
    has as many slots as the largest group has rows.
    """

    def __init__(self, prompts, rows, room):
        super().__init__()
        self.length, self.room, self.start, self.prompts = prompts.length, room, prompts.length, []
        for pair in prompts.layers:
            self.prompts.append(tuple(x.contiguous() for x in pair))                 # (P, H, start, D) each
            self.layers.append(tuple(x.new_empty(len(rows), x.shape[1], room, x.shape[3]) for x in pair))
        self.place(rows)

    @property
    def written(self):
        return self.length - self.start

    def place(self, prompt):
        """Gives every row a slot. prompt: (n,) index of the prompt that each row continues."""
        used, group, size = prompt.unique(return_inverse=True, return_counts=True)   # (P,), (n,), (P,)
        if len(used) < len(self.prompts[0][0]):
            self.prompts = [tuple(x.index_select(0, used) for x in pair) for pair in self.prompts]
        order, S = group.argsort(stable=True), int(size.max())
        number = torch.arange(len(group), device=group.device) - (size.cumsum(0) - size)[group[order]]  # in its group
        self.group, self.slots, self.slot = group, group.new_zeros(len(used), S), torch.empty_like(group)
        self.slot[order] = group[order] * S + number                                 # (n,) the slot of each row
        self.slots.view(-1)[self.slot] = torch.arange(len(group), device=group.device)  # (P, S) the row of each slot

    def keep(self, rows):
        super().keep(rows)
        self.place(self.group[rows])

    def mask(self, T, padding, device):
        """What is added to the scores of the prompts' columns, (P, 1, 1, start): -inf at padding; or None."""
        assert T == 1, T
        if padding is None:
            return None
        hidden = torch.arange(self.start, device=device) < padding[self.slots[:, 0], None]  # (P, start)
        return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)[:, None, None]

    def layer(self, i):
        def read(q, k, v, mask, *settings):
            prompt_k, prompt_v = self.prompts[i]                                     # (P, H, start, D) each
            k, v = self.extend(i, self.layers[i], k, v)                              # (n, H, L, D) each
            q = q * q.shape[3] ** -0.5                                               # (n, H, 1, D)
            with torch.autocast(q.device.type, enabled=False):
                shared = self.by_prompt(q) @ prompt_k.transpose(2, 3)                # (P, H, S, start)
                shared = self.by_row(shared if mask is None else shared + mask)      # (n, H, 1, start)
                weight = torch.cat((shared, q @ k.transpose(2, 3)), 3).softmax(3)    # (n, H, 1, start + L)
                shared, own = weight.split([self.start, k.shape[2]], 3)
                return self.by_row(self.by_prompt(shared) @ prompt_v) + own @ v      # (n, H, 1, D)
        return read

    def by_prompt(self, x):
        """The rows of each group together: (n, H, 1, X) -> (P, H, S, X)."""
        x = x.squeeze(2).index_select(0, self.slots.flatten())                       # (P S, H, X)
        return x.unflatten(0, self.slots.shape).transpose(1, 2)

    def by_row(self, x):
        """(P, H, S, X) -> (n, H, 1, X), as by_prompt had them."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.slot)[:, :, None]
