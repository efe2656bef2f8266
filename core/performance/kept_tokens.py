"""The tokens that truncation kept: their ids, stored until they are scored."""

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class KeptTokens:
    """The tokens that truncation kept in each of K distributions: their ids, one distribution after another."""
    ids: torch.Tensor     # (E,) int32
    counts: torch.Tensor  # (K,) int64, on the CPU: number of ids of each distribution

    @classmethod
    def of(cls, mask):
        """The kept tokens of a mask (K, V) bool. Waits for the device."""
        row, ids = mask.nonzero(as_tuple=True)                                       # (E,) each
        return cls(ids.int(), row.bincount(minlength=len(mask)).cpu())

    @classmethod
    def join(cls, parts):
        """The parts one after another; None if there are none, or if they are None: all tokens were kept."""
        if not parts or parts[0] is None:
            return None
        return cls(torch.cat([part.ids for part in parts]), torch.cat([part.counts for part in parts]))

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, index):
        """A copy of the distributions that index (k,), on the CPU, lists."""
        counts = self.counts[index]                                                  # (k,)
        end = self.counts.cumsum(0)[index]                                           # (k,)
        # Slices, because an index of all their ids would take more memory than the ids
        slices = zip((end - counts).tolist(), end.tolist(), strict=True)
        return KeptTokens(torch.cat([self.ids[:0], *(self.ids[i:j] for i, j in slices)]), counts)

    def split(self, size):
        """A list of parts of `size` distributions each; the last part has the rest."""
        counts = self.counts.split(size)
        ids = self.ids.split([int(part.sum()) for part in counts])
        return [KeptTokens(*part) for part in zip(ids, counts, strict=True)]

    def to(self, device):
        return KeptTokens(self.ids.to(device), self.counts)

    def dense(self, vocabulary):
        """The mask (K, V) bool."""
        row = torch.arange(len(self)).repeat_interleave(self.counts)                 # (E,)
        mask = torch.zeros(len(self), vocabulary, dtype=torch.bool, device=self.ids.device)
        mask[row.to(self.ids.device), self.ids.long()] = True
        return mask


class KeptCollector:
    """Collects kept tokens while completions are sampled, and puts them in the order of the sampled tokens."""

    def __init__(self):
        self.numbers, self.parts = [], []

    def add(self, numbers, kept):
        """numbers: (k,) on the CPU, the rank of each distribution of `kept` in the final order."""
        self.numbers.append(numbers)
        self.parts.append(kept)

    def joined(self):
        """All KeptTokens in ascending order of their numbers; None if there are none."""
        kept, self.parts = KeptTokens.join(self.parts), []
        return None if kept is None else kept[torch.cat(self.numbers).argsort()]
