"""Truncation: the tokens that may be drawn, and how they are kept until they are scored."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGE_VOCABULARY = 2**14   # from here on the likeliest tokens are looked for first: sorting all of them is slow
TOP_PART = 1024            # number of likeliest tokens that are looked for first


def kept_tokens(logp: Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    """Marks the tokens that may be drawn: the top_k likeliest (0: all), of them the nucleus, of it those at least min_p
    times as likely as the likeliest (arXiv 2407.01082). logp: (K, V). Returns (K, V) bool."""
    kept = torch.ones_like(logp, dtype=torch.bool)
    of_top_k = logp
    if 0 < top_k < logp.shape[-1]:
        ids = logp.topk(top_k).indices                                               # (K, top_k)
        kept = torch.zeros_like(kept).scatter(-1, ids, True)
        of_top_k = logp.masked_fill(~kept, -torch.inf).log_softmax(-1)
    if top_p < 1:
        kept &= nucleus(of_top_k, top_p)
    if min_p > 0:
        likeliest = logp.amax(-1, keepdim=True)                                      # (K, 1)
        kept &= logp >= likeliest + math.log(min_p)
    return kept


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches top_p (arXiv 1904.09751); of equally likely ones
    it takes the first. logp: (K, V). Returns (K, V) bool."""
    p = logp.exp()
    if p.shape[-1] < LARGE_VOCABULARY or p.is_cuda:  # a GPU sorts faster than the host hears of open ones
        return nucleus_of_all(p, top_p)
    kept, is_open = nucleus_of_top_part(p, top_p)
    kept[is_open] = nucleus_of_all(p[is_open], top_p)
    return kept


def nucleus_of_all(p: Tensor, top_p: float) -> Tensor:
    """The nucleus of probabilities (K, V), sorting all of them."""
    ordered, order = p.sort(descending=True, stable=True)                            # (K, V)
    before = ordered.cumsum(-1) - ordered                                            # (K, V) of the likelier tokens
    kept = before < top_p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter(-1, order, kept)


def nucleus_of_top_part(p: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The nucleus of probabilities (K, V) among their TOP_PART largest, and (K,) bool: whether it may reach beyond."""
    top, ids = p.topk(TOP_PART)                                                      # (K, TOP_PART)
    ids, by_id = ids.sort(-1)  # the order in which topk lists equally likely tokens depends on the device
    top = top.gather(-1, by_id)
    kept = nucleus_of_all(top, top_p)                                                # (K, TOP_PART)
    # Tokens that are as likely as the last of the top part may lie outside of it
    last = top.masked_fill(~kept, torch.inf).amin(-1)                                # (K,)
    is_open = last <= top.amin(-1)                                                   # (K,)
    none = torch.zeros_like(p, dtype=torch.bool)
    return none.scatter(-1, ids, kept), is_open


@dataclass(eq=False)
class KeptTokens:
    """The tokens that truncation kept in each of K distributions: their ids, one distribution after another. They wait
    on the CPU until they are scored."""
    ids: torch.Tensor     # (E,) int32
    counts: torch.Tensor  # (K,) int64: number of ids of each distribution

    @classmethod
    def of(cls, mask: Tensor) -> "KeptTokens":
        """The kept tokens of a mask (K, V) bool. Waits for the device."""
        return cls(mask.nonzero()[:, 1].int().cpu(), mask.sum(1).cpu())

    @classmethod
    def join(cls, parts: "Sequence[KeptTokens | None]") -> "KeptTokens | None":
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

    def split(self, size: int | list[int]) -> "list[KeptTokens]":
        """A list of parts of `size` distributions each, the last with the rest; or of as many as a list says."""
        counts = self.counts.split(size)
        ids = self.ids.split([int(part.sum()) for part in counts])
        return [KeptTokens(*part) for part in zip(ids, counts, strict=True)]

    def dense(self, vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
        """The mask (K, V) bool."""
        row = torch.arange(len(self)).repeat_interleave(self.counts)                 # (E,)
        place = (row * vocabulary + self.ids).to(device, non_blocking=True)          # (E,) in the flattened mask
        mask = torch.zeros(len(self) * vocabulary, dtype=torch.bool, device=device)
        return mask.index_fill_(0, place, True).view(len(self), vocabulary)


class KeptCollector:
    """Collects kept tokens while completions are sampled, and puts them in the order of the sampled tokens."""

    def __init__(self):
        self.numbers, self.parts = [], []

    def add(self, numbers: Tensor, kept: KeptTokens) -> None:
        """numbers: (k,) on the CPU, the rank of each distribution of `kept` in the final order."""
        self.numbers.append(numbers)
        self.parts.append(kept)

    def joined(self) -> KeptTokens | None:
        """All KeptTokens in ascending order of their numbers; None if there are none."""
        kept, self.parts = KeptTokens.join(self.parts), []
        return None if kept is None else kept[torch.cat(self.numbers).argsort()]
