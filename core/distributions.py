"""Distributions over tokens: drawing, truncation, log-probabilities and entropy. In float32 and nats."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.device import gpu_logits_at_once

SAMPLING = 1               # first number of the seeds here; other files have others, so their noise differs
LOGITS_AT_ONCE = 2**25     # most numbers in one tensor of logits on a CPU
LARGE_VOCABULARY = 2**14   # from this size on a nucleus is sought among the most likely tokens first: sorting is slow
TOP_PART = 1024            # number of these tokens


def at_least_float32(x: Tensor) -> Tensor:
    """bfloat16 becomes float32; float64, which checks of gradients use, stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sampling_logp(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-probabilities (..., V) before truncation. logits: (..., V) float32; temperature: a number, or a tensor that
    broadcasts."""
    return (logits / temperature).log_softmax(-1)


def restrict(logp: Tensor, kept: "Tensor | KeptTokens | None") -> Tensor:
    """logp (..., V) renormalised over the kept tokens, -inf elsewhere.

    kept: (..., V) bool; or the KeptTokens of logp (K, V); or None, if all tokens are kept
    """
    if kept is None:
        return logp
    mask = kept
    if isinstance(kept, KeptTokens):
        mask = kept.dense(logp.shape[-1], logp.device)
    return logp.masked_fill(~mask, -torch.inf).log_softmax(-1)


def token_logp(logp: Tensor, target: Tensor) -> Tensor:
    """Log-probability of each token. logp: (..., V); target: (...) ids. Returns (...)."""
    return logp.gather(-1, target[..., None]).squeeze(-1)


def entropy(logp: Tensor) -> Tensor:
    """Entropy of each distribution. logp: (..., V) -> (...)."""
    surprise = -logp.clamp(min=-1e4)  # finite where p is 0: 0 times infinity would be NaN
    return (logp.exp() * surprise).sum(-1)


# Drawing

def draw_uniforms(seed: int, step: int, numbers: Iterable[int], shape: tuple) -> Tensor:
    """Uniform noise in [0, 1), float64, (len(numbers), *shape), on the CPU.

    Row i depends only on (seed, step, numbers[i]). A problem therefore has the same samples on every device, and in
    every batch and rank in which it is drawn.
    """
    noise = []
    for number in numbers:
        rng = np.random.default_rng([SAMPLING, seed, step, int(number)])
        noise.append(rng.random(shape))
    return torch.from_numpy(np.stack(noise))


def noise_on(device: torch.device, uniform: Tensor) -> Tensor:
    """The noise on the device that draws tokens. For MPS, which has no float64, this is the CPU."""
    if device.type == "mps":
        return uniform.cpu()
    return uniform.to(device)


def sample_from(logp: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling: draws the token at which the cumulative probability first exceeds the noise.

    logp: (K, V) log-probabilities; uniform: (K, G) in [0, 1)
    Returns ids (K, G), never one of probability 0; where logp is NaN, any
    """
    cdf = logp.to(uniform.device).exp().double().cumsum_(1)                          # (K, V)
    # The last number of the cdf is 1 only up to rounding. Scaled by it, no noise is beyond the last token.
    height = uniform * cdf[:, -1:]                                                   # (K, G)
    # right=True: where a token of probability 0 leaves the cdf as it was, the next token is drawn
    ids = torch.searchsorted(cdf, height, right=True)                                # (K, G)
    return ids.clamp_(max=logp.shape[1] - 1).to(logp.device)


def sample_tokens(
        logits: Tensor,                      # (K, V)
        uniform: Tensor,                     # (K, G) noise in [0, 1)
        temperature: float | Tensor = 1.0,   # a number, or (K, 1)
        top_p: float = 1.0,                  # 1: all tokens
        top_k: int = 0,                      # 0: all tokens; 1: the most likely one
        min_p: float = 0.0) -> tuple:        # 0: all tokens
    """Draws G tokens from each of K distributions.

    Returns ids (K, G), their log-probabilities (K, G) under the distribution drawn from, and the mask (K, V) of the
    kept tokens, or None if all are kept
    """
    logp = sampling_logp(logits, temperature)                                        # (K, V)
    kept = None
    if top_p < 1 or top_k > 0 or min_p > 0:
        kept = kept_tokens(logp, top_p, top_k, min_p)                                # (K, V)
    logp = restrict(logp, kept)
    ids = sample_from(logp, uniform)                                                 # (K, G)
    return ids, logp.gather(1, ids), kept


def draw_tokens(
        model: nn.Module,
        h: Tensor,                           # (K, C) hidden states
        uniform: Tensor,
        temperature: float | Tensor = 1.0,
        as_mask: bool = False,
        **truncation) -> tuple:
    """Draws tokens as sample_tokens does, from hidden states, with the logits of few of them at a time. The kept tokens
    are KeptTokens or, with as_mask, a mask, which does not wait for the device."""
    def draw(h, uniform, temperature):
        logits = model.project(h)
        ids, logp, kept = sample_tokens(logits, uniform, temperature, **truncation)
        if kept is not None and not as_mask:
            kept = KeptTokens.of(kept)
        return ids, logp, kept

    return in_parts(draw, model.vocabulary, h, uniform, temperature)


def rows_at_once(vocabulary: int, device: torch.device) -> int:
    """The number of rows in the largest allowed tensor of logits."""
    most = LOGITS_AT_ONCE
    if device.type == "cuda":
        most = gpu_logits_at_once(device)
    return max(1, most // vocabulary)


def in_parts(function: Callable, vocabulary: int, *inputs) -> tuple:
    """function(*inputs), called on so few rows at a time that their logits fit into memory.

    inputs: tensors of K rows and KeptTokens of K distributions, which are split; all else each call gets as it is
    function: returns a tuple, each item a tensor of K rows, KeptTokens of K distributions, or None
    If the rows are split, the backward pass computes each part again instead of keeping it: memory is bounded in both
    directions.
    """
    size = rows_at_once(vocabulary, inputs[0].device)
    if len(inputs[0]) <= size:
        return function(*inputs)
    columns = []
    for x in inputs:
        has_rows = isinstance(x, (Tensor, KeptTokens))
        columns.append(x.split(size) if has_rows else itertools.repeat(x))
    results = []
    for part in zip(*columns):
        if torch.is_grad_enabled():
            results.append(checkpoint(function, *part, use_reentrant=False))
        else:
            results.append(function(*part))
    return tuple(map(concatenated, zip(*results)))


def concatenated(parts: Sequence) -> Any:
    """The parts of a result of in_parts one after another."""
    if parts[0] is None:
        return None
    if isinstance(parts[0], KeptTokens):
        return KeptTokens.join(parts)
    return torch.cat(parts)


# Truncation: the tokens that may be drawn, and how they are kept until they are scored

def kept_tokens(logp: Tensor, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Tensor:
    """Marks the tokens that may be drawn: the top_k most likely (0: all); of these, the nucleus; of the nucleus, tokens
    at least min_p times as likely as the most likely one (arXiv 2407.01082). logp: (K, V). Returns (K, V) bool."""
    kept = torch.ones_like(logp, dtype=torch.bool)
    among_top_k = logp
    if 0 < top_k < logp.shape[-1]:
        ids = logp.topk(top_k).indices                                               # (K, top_k)
        kept = torch.zeros_like(kept).scatter(-1, ids, True)
        among_top_k = restrict(logp, kept)
    if top_p < 1:
        kept &= nucleus(among_top_k, top_p)
    if min_p > 0:
        highest = logp.amax(-1, keepdim=True)                                        # (K, 1)
        kept &= logp >= highest + math.log(min_p)
    return kept


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches top_p (arXiv 1904.09751). Among equally likely
    tokens it takes the first. logp: (K, V). Returns (K, V) bool."""
    p = logp.exp()
    # On a GPU sorting takes less time than the host's wait for the incomplete rows
    if p.shape[-1] < LARGE_VOCABULARY or p.is_cuda:
        return nucleus_of_all(p, top_p)
    kept, incomplete = nucleus_of_top_part(p, top_p)
    rest = p[incomplete]
    kept[incomplete] = nucleus_of_all(rest, top_p)
    return kept


def nucleus_of_all(p: Tensor, top_p: float) -> Tensor:
    """The nucleus of probabilities (K, V), found by sorting all of them."""
    ordered, order = p.sort(descending=True, stable=True)                            # (K, V)
    before = ordered.cumsum(-1) - ordered                                            # (K, V) of the likelier tokens
    kept = before < top_p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter(-1, order, kept)


def nucleus_of_top_part(p: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The nucleus of probabilities (K, V) among their TOP_PART largest, and (K,) bool, True where it is incomplete: it
    may need more tokens."""
    top, ids = p.topk(TOP_PART)                                                      # (K, TOP_PART)
    ids, by_id = ids.sort(-1)  # the order in which topk lists equally likely tokens depends on the device
    top = top.gather(-1, by_id)
    kept = nucleus_of_all(top, top_p)                                                # (K, TOP_PART)
    # If the nucleus takes the least likely token of the top part, tokens outside may be as likely
    last = top.masked_fill(~kept, torch.inf).amin(-1)                                # (K,)
    incomplete = last <= top.amin(-1)                                                # (K,)
    none = torch.zeros_like(p, dtype=torch.bool)
    return none.scatter(-1, ids, kept), incomplete


@dataclass(eq=False)
class KeptTokens:
    """The tokens that truncation kept in each of K distributions: their ids, one distribution after another.

    They wait on the CPU until they are scored. The lists are ragged because nuclei differ so much: most have a few
    tokens, some have most of a vocabulary of 150,000. In a rectangle every row would be as wide as the widest.
    """
    ids: Tensor     # (E,) int32
    counts: Tensor  # (K,) int64: number of ids of each distribution

    @classmethod
    def of(cls, mask: Tensor) -> "KeptTokens":
        """The kept tokens of a mask (K, V) bool. Waits for the device."""
        _, ids = mask.nonzero(as_tuple=True)
        counts = mask.sum(1)
        return cls(ids.int().cpu(), counts.cpu())

    @classmethod
    def join(cls, parts: "Sequence[KeptTokens]") -> "KeptTokens":
        """The parts one after another."""
        ids = [part.ids for part in parts]
        counts = [part.counts for part in parts]
        return cls(torch.cat(ids), torch.cat(counts))

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, index):
        """A copy of some distributions. index: (k,) integers or (K,) bool, on the CPU"""
        # Slices, because an index of all their ids would take more memory than the ids
        slices = self.ids.split(self.counts.tolist())                                # K of them
        chosen = torch.arange(len(self))[index].tolist()
        ids = [self.ids[:0]]
        ids += [slices[i] for i in chosen]
        return KeptTokens(torch.cat(ids), self.counts[index])

    def split(self, size: int | list[int]) -> "list[KeptTokens]":
        """Parts of `size` distributions each, the last with the remainder. A list has the size of each part."""
        counts = self.counts.split(size)
        totals = [int(part.sum()) for part in counts]
        ids = self.ids.split(totals)
        return list(map(KeptTokens, ids, counts))

    def dense(self, vocabulary: int, device: torch.device | str = "cpu") -> Tensor:
        """The mask (K, V) bool."""
        K = len(self)
        row = torch.arange(K).repeat_interleave(self.counts)                         # (E,)
        place = row * vocabulary + self.ids                                          # (E,) in the flattened mask
        place = place.to(device, non_blocking=True)
        mask = torch.zeros(K * vocabulary, dtype=torch.bool, device=device)
        mask.index_fill_(0, place, True)
        return mask.view(K, vocabulary)


class KeptCollector:
    """Collects kept tokens during sampling, and puts them in the order of the sampled tokens."""

    def __init__(self):
        self.numbers, self.parts = [], []

    def add(self, numbers: Tensor, kept: KeptTokens) -> None:
        """numbers: (k,) on the CPU, the rank of each distribution of `kept` in the final order."""
        self.numbers.append(numbers)
        self.parts.append(kept)

    def joined(self) -> KeptTokens | None:
        """All KeptTokens in ascending order of their numbers; None if there are none."""
        if not self.parts:
            return None
        kept = KeptTokens.join(self.parts)
        self.parts = []  # frees memory before the copy
        return kept[torch.cat(self.numbers).argsort()]
