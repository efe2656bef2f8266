"""Distributions over tokens: drawing, truncation, log-probabilities and entropy. In float32 and nats."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.device import gpu_logits_at_once

SAMPLING = 1               # the first number of the seeds here, so that the noise differs from that of other files
LOGITS_AT_ONCE = 2**25     # most numbers in one tensor of logits on a CPU
LARGE_VOCABULARY = 2**14   # from here on the likeliest tokens are looked for first: sorting all of them is slow
TOP_PART = 1024            # number of likeliest tokens that are looked for first


def at_least_float32(x: Tensor) -> Tensor:
    """bfloat16 becomes float32; float64, where gradients are checked, stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sampling_logp(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-probabilities (..., V) before truncation. logits: (..., V) float32; temperature: a number, or a tensor that
    broadcasts."""
    return (logits / temperature).log_softmax(-1)


def restrict(logp: Tensor, kept: "Tensor | KeptTokens | None") -> Tensor:
    """logp (..., V) renormalised over the kept tokens, -inf elsewhere. kept: (..., V) bool, or the KeptTokens of logp
    (K, V), or None for all tokens."""
    if kept is None:
        return logp
    mask = kept if torch.is_tensor(kept) else kept.dense(logp.shape[-1], logp.device)
    return logp.masked_fill(~mask, -torch.inf).log_softmax(-1)


def token_logp(logp: Tensor, target: Tensor) -> Tensor:
    """Log-probability of each token. logp: (..., V); target: (...) ids. Returns (...)."""
    return logp.gather(-1, target[..., None]).squeeze(-1)


def entropy(logp: Tensor) -> Tensor:
    """Entropy of each distribution. logp: (..., V) -> (...)."""
    surprise = -logp.clamp(min=-1e4)                                                 # finite where p is 0
    return (logp.exp() * surprise).sum(-1)


def draw_uniforms(seed: int, step: int, numbers: Iterable[int], shape: tuple) -> Tensor:
    """Uniform noise in [0, 1), float64, (len(numbers), *shape), on the CPU. Row i depends on (seed, step, numbers[i])
    alone, so that a problem's samples are the same on every device, in whatever batch or rank it is drawn."""
    rngs = [np.random.default_rng([SAMPLING, seed, step, int(number)]) for number in numbers]
    return torch.from_numpy(np.stack([rng.random(shape) for rng in rngs]))


def noise_on(device: torch.device, uniform: Tensor) -> Tensor:
    """The noise on the device where tokens are drawn; for MPS, which has no float64, that is the CPU."""
    return uniform.to("cpu" if device.type == "mps" else device)


def sample_from(logp: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: a token is drawn where the cumulative probability first exceeds the noise.

    logp: (K, V) log-probabilities; uniform: (K, G) in [0, 1)
    Returns ids (K, G), never one of probability 0; where logp is NaN, any
    """
    cdf = logp.to(uniform.device).exp().double().cumsum_(1)                          # (K, V)
    ids = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)                 # (K, G)
    return ids.clamp_(max=logp.shape[1] - 1).to(logp.device)


def sample_tokens(logits: Tensor, uniform: Tensor, temperature: float | Tensor = 1.0, top_p: float = 1.0,
                  top_k: int = 0, min_p: float = 0.0, keep: Callable | None = None) -> tuple:
    """Draws G tokens from each of K distributions; top_k=1 takes the likeliest. Functions that call this one hand its
    settings on as `sampling`.

    logits: (K, V); uniform: (K, G) in [0, 1); temperature: as in sampling_logp
    keep: what is kept of the mask (K, V) of tokens that may be drawn, a function; None: KeptTokens.of
    Returns ids (K, G), their log-probabilities (K, G) under the distribution drawn from, and the kept tokens, or None
    for all tokens
    """
    logp = sampling_logp(logits, temperature)                                        # (K, V)
    kept = None
    if top_p < 1 or top_k > 0 or min_p > 0:
        mask = kept_tokens(logp, top_p, top_k, min_p)                                # (K, V)
        kept = (keep or KeptTokens.of)(mask)
        logp = restrict(logp, mask)
    target = sample_from(logp, uniform)                                              # (K, G)
    return target, logp.gather(1, target), kept


def draw_tokens(model: nn.Module, h: Tensor, uniform: Tensor, temperature: float | Tensor = 1.0, **truncation) -> tuple:
    """Draws tokens as sample_tokens does, from K hidden states h (K, C), with the logits of few states at a time.
    temperature: a number, or (K, 1)"""
    size = rows_at_once(model.vocabulary, h.device)
    parts = []
    for i in range(0, len(h), size):
        rows = slice(i, i + size)
        t = temperature[rows] if torch.is_tensor(temperature) else temperature
        parts.append(sample_tokens(model.project(h[rows]), uniform[rows], t, **truncation))
    target, logp, kept = zip(*parts, strict=True)
    kept = None if kept[0] is None else getattr(kept[0], "join", torch.cat)(kept)
    return torch.cat(target), torch.cat(logp), kept


def rows_at_once(vocabulary: int, device: torch.device) -> int:
    """The rows of the largest tensor of logits."""
    most = gpu_logits_at_once(device) if device.type == "cuda" else LOGITS_AT_ONCE
    return max(1, most // vocabulary)


def in_parts(function: Callable, vocabulary: int, *tensors) -> tuple:
    """function(*tensors) on few enough rows at a time that its logits do not take too much memory.

    function: tensors of K rows (or KeptTokens of K distributions, or None) -> a tuple of tensors of K rows. Where it is
    cut, the backward pass computes each part again instead of keeping it, so that memory is bounded in both directions.
    """
    size = rows_at_once(vocabulary, tensors[0].device)
    if len(tensors[0]) <= size:
        return function(*tensors)
    columns = [itertools.repeat(None) if x is None else x.split(size) for x in tensors]
    results = [checkpoint(function, *part, use_reentrant=False) for part in zip(*columns)]
    return tuple(torch.cat(column) for column in zip(*results, strict=True))


# Truncation: the tokens that may be drawn, and how they are kept until they are scored

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
