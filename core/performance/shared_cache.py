"""A cache for generation that holds the keys and values of each prompt once."""

import torch


class SharedCache:
    """Keys and values of each prompt, once, whatever the number of rows that continue it, and those of each row's own
    tokens. It has the methods that generation asks of core.cache.Cache.

    The rows of a prompt are its group. All queries of a group read the prompt's keys in one product, so each prompt
    has as many slots as the largest group has rows.
    """

    def __init__(self, prompts, rows, own):
        """prompts: a Cache of P prompts; rows: (n,) the prompt that each row continues; own: an empty Cache for n rows,
        with room for their tokens"""
        self.start, self.own = prompts.length, own
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
        used, self.prompt, size = prompt.unique(return_inverse=True, return_counts=True)  # (P,), (n,), (P,)
        if len(used) < len(self.prompts[0][0]):
            self.prompts = [[x.index_select(0, used) for x in pair] for pair in self.prompts]
        rows = torch.arange(len(prompt), device=prompt.device)
        order = self.prompt.argsort(stable=True)
        S = int(size.max())
        first = size.cumsum(0) - size                                                # (P,) of each group, in this order
        self.slot_of_row = torch.empty_like(prompt)                                  # (n,) in 0 .. P S - 1
        self.slot_of_row[order] = self.prompt[order] * S + rows - first[self.prompt[order]]
        self.row_of_slot = prompt.new_zeros(len(used), S)                            # (P, S) 0 where there is none
        self.row_of_slot.view(-1)[self.slot_of_row] = rows

    def keep(self, rows):
        """Drops all rows but these, as Cache.keep does."""
        self.own.keep(rows)
        self.assign_slots(self.prompt[rows])

    def mask(self, T, padding, device):
        """A term (P, 1, 1, start) for the attention scores of the prompts' columns, -inf at padding; None without
        padding. padding: (n,) or None"""
        assert T == 1, T
        if padding is None:
            return None
        is_padding = torch.arange(self.start, device=device) < padding[self.row_of_slot[:, 0], None]  # (P, start)
        return torch.where(is_padding, -torch.inf, 0.0)[:, None, None]

    def layer(self, i):
        """The attention of layer i, as Cache.layer, for one new token of each row."""
        def read(q, k, v, mask, *settings):
            prompt_k, prompt_v = self.prompts[i]                                     # (P, H, start, D) each
            k, v = self.own.add(i, self.own.layers[i], k, v)                         # (n, H, L, D) each
            q = q * q.shape[3] ** -0.5                                               # (n, H, 1, D)
            with torch.autocast(q.device.type, enabled=False):
                scores = self.by_prompt(q) @ prompt_k.transpose(2, 3)                # (P, H, S, start)
                scores = self.by_row(scores if mask is None else scores + mask)      # (n, H, 1, start)
                weight = torch.cat((scores, q @ k.transpose(2, 3)), 3).softmax(3)    # (n, H, 1, start + L)
                of_prompt, of_own = weight.split([self.start, k.shape[2]], 3)
                return self.by_row(self.by_prompt(of_prompt) @ prompt_v) + of_own @ v  # (n, H, 1, D)
        return read

    def by_prompt(self, x):
        """The rows of each group together: (n, H, 1, X) -> (P, H, S, X)."""
        x = x.squeeze(2).index_select(0, self.row_of_slot.flatten())                 # (P S, H, X)
        return x.unflatten(0, self.row_of_slot.shape).transpose(1, 2)

    def by_row(self, x):
        """(P, H, S, X) -> (n, H, 1, X), as by_prompt had them."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.slot_of_row)[:, :, None]
