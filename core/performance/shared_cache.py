"""A cache for generation that holds the keys and values of each prompt once."""

import torch
from torch.nn import functional as F


class SharedCache:
    """Keys and values of each prompt, once, and those of each row's own tokens; the methods that generation asks of
    core.cache.Cache. All rows of a prompt read its keys in one product: a prompt has slots for the largest group."""

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
        """See Cache.layer; for one new token of each row."""
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
