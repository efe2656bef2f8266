"""Distributions over tokens: drawing, truncation, log-probabilities and entropy. In float32 and nats."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from core.device import gpu_logits_at_once

SAMPLING = 1               # first number of the seeds of this noise; seeds in other files start with others
LOGITS_AT_ONCE = 2**25     # most numbers in one tensor of logits on a CPU
LARGE_VOCABULARY = 2**14   # from this size on, sorting and adding up all tokens is slow
TOP_PART = 1024            # tokens in the top part, the most likely tokens, in which a nucleus is first sought
BLOCK = 128                # tokens in a block of a large vocabulary: a block is drawn first, then a token in it


def at_least_float32(x: Tensor) -> Tensor:
    """Converts bfloat16 to float32; keeps float64, which gradient checks use."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.to(dtype)


def sampling_logp(
        logits: Tensor,                              # (..., V) float32
        temperature: float | Tensor = 1.0) -> Tensor:
    """Log-probabilities (..., V) before truncation. temperature: a number, or a tensor that broadcasts"""
    return (logits / temperature).log_softmax(-1)


def restrict(logp: Tensor, kept: "Tensor | KeptTokens | None") -> Tensor:
    """Renormalises logp (..., V) over the kept tokens, with -inf elsewhere.

    kept: (..., V) bool; or the KeptTokens of logp (K, V); or None, if all tokens are kept
    """
    if kept is None:
        return logp
    if isinstance(kept, KeptTokens):
        vocabulary = logp.shape[-1]
        kept = kept.dense(vocabulary, logp.device)
    logp = logp.masked_fill(~kept, -torch.inf)
    return logp.log_softmax(-1)


def token_logp(logp: Tensor, target: Tensor) -> Tensor:
    """Returns the log-probability (...) of each token. logp: (..., V); target: (...) ids"""
    index = target[..., None]                                                        # (..., 1)
    return logp.gather(-1, index).squeeze(-1)


def entropy(logp: Tensor) -> Tensor:
    """Returns the entropy (...) of each distribution. logp: (..., V)"""
    surprise = -logp.clamp(min=-1e4)  # finite where p is 0: 0 times infinity would be NaN
    p = logp.exp()
    return (p * surprise).sum(-1)


# Drawing

def draw_uniforms(
        seed: int,
        step: int,
        numbers: Iterable[int],  # of the problems
        shape: tuple) -> Tensor:
    """Draws uniform noise in [0, 1), float64, (len(numbers), *shape), on the CPU.

    Row i depends only on (seed, step, numbers[i]). A problem therefore has the same samples on every device and rank
    and in every batch.
    """
    noise = []
    for number in numbers:
        seeds = [SAMPLING, seed, step, int(number)]
        rng = np.random.default_rng(seeds)
        noise.append(rng.random(shape))
    return torch.from_numpy(np.stack(noise))


def noise_on(device: torch.device, uniform: Tensor) -> Tensor:
    """Moves the noise to the device that draws tokens; for MPS, which has no float64, the CPU draws them."""
    if device.type == "mps":
        return uniform.cpu()
    return uniform.to(device)


def sample_from(logp: Tensor, uniform: Tensor) -> Tensor:
    """Draws the token at which the cumulative probability first exceeds the noise (inverse-CDF sampling).

    logp: (K, V) log-probabilities; uniform: (K, G) in [0, 1)
    Returns ids (K, G). A token of probability 0 is never drawn. A distribution with NaN gives some valid id
    """
    p = logp.exp()
    vocabulary = p.shape[1]
    if vocabulary < LARGE_VOCABULARY:
        ids, _ = first_above(p, uniform)                                             # (K, G)
        return ids.to(p.device)
    # Running sums of all tokens in float64 would take most of the time. A block is drawn first, then a token in it:
    # only the sums of the blocks and the drawn blocks are added up in float64, and go to the CPU if the noise is there
    rest = -vocabulary % BLOCK
    if rest:  # few vocabularies are no multiple
        p = F.pad(p, (0, rest))
    blocks = p.unflatten(1, (-1, BLOCK))                                             # (K, B, BLOCK)
    sums = blocks.sum(2)                                                             # (K, B)
    block, above = first_above(sums, uniform)                                        # (K, G) each
    drawn_sum = sums.to(uniform.device).gather(1, block)                             # (K, G)
    share = 1 - above / drawn_sum
    share = share.clamp(min=0)  # rounding may make it negative
    index = block.to(p.device)[..., None]
    inside = blocks.gather(1, index.expand(-1, -1, BLOCK))                           # (K, G, BLOCK)
    place, _ = first_above(inside, share[..., None])                                 # (K, G, 1)
    ids = block * BLOCK + place[..., 0]                                              # (K, G)
    return ids.clamp(max=vocabulary - 1).to(p.device)  # NaN may give a place after the last token


def first_above(p: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Finds where the running sum of p (..., V) first exceeds a share of the whole sum, on the device of the shares.

    uniform: the shares (..., G) in [0, 1)
    Returns the indices (..., G), at which p is not 0 (of NaN: any), and how far the running sum there exceeds (..., G)
    """
    p = p.to(uniform.device)
    cdf = p.double().cumsum(-1)                                                      # (..., V)
    # Rounding makes the end of the cdf slightly different from 1, and noise above it would find no token. Noise is
    # therefore scaled to the end.
    height = uniform * cdf[..., -1:]                                                 # (..., G)
    # A token of probability 0 has the same cdf as the token before it. With right=True, noise equal to that number
    # skips both, to a token of positive probability.
    index = torch.searchsorted(cdf, height, right=True)                              # (..., G)
    last = p.shape[-1] - 1
    index.clamp_(max=last)
    above = cdf.gather(-1, index) - height                                           # (..., G)
    return index, above


def sample_tokens(
        logits: Tensor,                      # (K, V)
        uniform: Tensor,                     # (K, G) noise in [0, 1)
        temperature: float | Tensor = 1.0,   # a number, or (K, 1)
        top_p: float = 1.0,                  # 1: all tokens
        top_k: int = 0,                      # 0: all tokens; 1: the most likely one
        min_p: float = 0.0,                  # 0: all tokens
        in_part: bool = False) -> tuple:     # looks only at the top part of a large vocabulary
    """Draws G tokens from each of K distributions.

    Returns ids (K, G), their log-probabilities (K, G) under the distribution drawn from, and the mask (K, V) of the
    kept tokens, or None if all are kept or, with top_k=1, only the drawn one. With in_part, a distribution whose kept
    tokens may exceed the top part keeps none, and its log-probabilities are NaN
    """
    if top_k == 1:
        highest, ids = logits.max(-1, keepdim=True)  # of equally likely tokens the lowest id
        logp = highest - highest  # 0, or NaN for a logit that is not finite
        return ids.expand_as(uniform), logp.expand_as(uniform), None
    logp = sampling_logp(logits, temperature)                                        # (K, V)
    kept = None
    if in_part:
        part, logp = top_part(logp)                                                  # (K, TOP_PART) each
    if top_p < 1 or top_k > 0 or min_p > 0:
        kept = kept_tokens(logp, top_p, top_k, min_p)                                # (K, V or TOP_PART)
    if in_part:
        kept &= ~may_exceed(logp.exp(), kept)
    logp = restrict(logp, kept)
    ids = sample_from(logp, uniform)                                                 # (K, G)
    logp = logp.gather(1, ids)
    if in_part:
        ids = part.gather(1, ids)
        none = torch.zeros_like(logits, dtype=torch.bool)
        kept = none.scatter(1, part, kept)                                           # (K, V)
    return ids, logp, kept


def draw_tokens(
        model: nn.Module,
        h: Tensor,                           # (K, C) hidden states
        uniform: Tensor,                     # (K, G)
        temperature: float | Tensor = 1.0,   # a number, or (K, 1)
        as_mask: bool = False,
        **truncation) -> tuple:
    """Draws tokens like sample_tokens, but from hidden states: computes the logits of a few states at a time.

    as_mask: returns the kept tokens as a mask (K, V), without waiting for the device, instead of as KeptTokens
    """
    def draw(h, uniform, temperature):
        logits = model.project(h)                                                    # (K, V)
        ids, logp, kept = sample_tokens(logits, uniform, temperature, **truncation)
        if kept is not None and not as_mask:
            kept = KeptTokens.of(kept)
        return ids, logp, kept

    return in_parts(draw, model.vocabulary, h, uniform, temperature)


def rows_at_once(vocabulary: int, device: torch.device) -> int:
    """Returns the number of rows in the largest allowed tensor of logits."""
    if device.type == "cuda":
        most = gpu_logits_at_once(device)
    else:
        most = LOGITS_AT_ONCE
    rows = most // vocabulary
    return max(1, rows)


def in_parts(function: Callable, vocabulary: int, *inputs) -> tuple:
    """Calls function(*inputs) on a few rows at a time, so that their logits fit into memory.

    inputs: tensors of K rows and KeptTokens of K distributions are split; other values, such as a temperature or
        None, go to every call. The first input must be a tensor
    function: returns a tuple; each item is a tensor of K rows, KeptTokens of K distributions, or None
    Returns the tuple of function(*inputs). If the rows are split, the backward pass recomputes each part instead of
    keeping it, so that memory is bounded in both passes.
    """
    first = inputs[0]
    size = rows_at_once(vocabulary, first.device)
    if len(first) <= size:
        return function(*inputs)
    parts_of_inputs = []
    for x in inputs:
        if isinstance(x, (Tensor, KeptTokens)):
            parts = x.split(size)
        else:
            parts = itertools.repeat(x)
        parts_of_inputs.append(parts)
    results = []
    for part in zip(*parts_of_inputs):
        if torch.is_grad_enabled():
            result = checkpoint(function, *part, use_reentrant=False)
        else:
            result = function(*part)
        results.append(result)
    joined = []
    for parts in zip(*results):  # one item of the tuple, in each result
        if parts[0] is None:
            whole = None
        elif isinstance(parts[0], KeptTokens):
            whole = KeptTokens.join(parts)
        else:
            whole = torch.cat(parts)
        joined.append(whole)
    return tuple(joined)


# Truncation: the tokens that may be drawn, and how they are kept until they are scored

def kept_tokens(
        logp: Tensor,          # (K, V)
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0) -> Tensor:
    """Marks the tokens that may be drawn: among the top_k most likely (0: all), the tokens of the nucleus that are at
    least min_p times as likely as the most likely token (arXiv 2407.01082). Returns (K, V) bool."""
    kept = torch.ones_like(logp, dtype=torch.bool)
    among_top_k = logp
    vocabulary = logp.shape[-1]
    if 0 < top_k < vocabulary:
        ids = logp.topk(top_k).indices                                               # (K, top_k)
        none = torch.zeros_like(kept)
        kept = none.scatter(-1, ids, True)
        among_top_k = restrict(logp, kept)
    if top_p < 1:
        kept &= nucleus(among_top_k, top_p)
    if min_p > 0:
        highest = logp.amax(-1, keepdim=True)                                        # (K, 1)
        lowest = highest + math.log(min_p)
        kept &= logp >= lowest
    return kept


def nucleus(logp: Tensor, top_p: float) -> Tensor:
    """Finds the smallest set of most likely tokens whose probability reaches top_p (arXiv 1904.09751). Ties go to the
    lowest id. logp: (K, V). Returns (K, V) bool."""
    p = logp.exp()
    # Only rows whose nucleus may exceed the top part are sorted as a whole. On a GPU all rows are, because the code of
    # a CUDA graph cannot wait for the list of these rows.
    vocabulary = p.shape[-1]
    if vocabulary < LARGE_VOCABULARY or p.is_cuda:
        return nucleus_of_all(p, top_p)
    part, top = top_part(p)                                                          # (K, TOP_PART) each
    in_part = nucleus_of_all(top, top_p)                                             # (K, TOP_PART)
    none = torch.zeros_like(p, dtype=torch.bool)                                     # (K, V)
    kept = none.scatter(-1, part, in_part)
    incomplete = may_exceed(top, in_part)[:, 0]                                      # (K,)
    rest = p[incomplete]                                                             # (r, V)
    kept[incomplete] = nucleus_of_all(rest, top_p)
    return kept


def nucleus_of_all(p: Tensor, top_p: float) -> Tensor:
    """Finds the nucleus of probabilities (K, V) by sorting all tokens."""
    ordered, order = p.sort(descending=True, stable=True)                            # (K, V)
    before = ordered.cumsum(-1) - ordered                                            # (K, V) of more likely tokens
    kept = before < top_p
    kept[..., 0] = True
    in_order_of_ids = torch.zeros_like(kept)
    return in_order_of_ids.scatter(-1, order, kept)


def top_part(x: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the TOP_PART largest numbers of each row of x (K, V). Returns their ids, ascending, and the numbers."""
    top, ids = x.topk(TOP_PART)                                                      # (K, TOP_PART) each
    # topk lists equally likely tokens in an order that depends on the device. Sorting by id breaks ties by id.
    ids, order = ids.sort(-1)
    return ids, top.gather(-1, order)


def may_exceed(p: Tensor, kept: Tensor) -> Tensor:
    """Tells where the kept tokens of a top part may not be all: (K, 1) bool. p, kept: (K, TOP_PART)"""
    # If the least likely token of the top part is kept, or one as likely, tokens outside this part may be kept, too, or
    # an equally likely token outside may have a lower id
    lowest_kept = p.masked_fill(~kept, torch.inf)                                    # (K, TOP_PART)
    lowest_kept = lowest_kept.amin(-1, keepdim=True)                                 # (K, 1)
    lowest = p.amin(-1, keepdim=True)
    return lowest_kept <= lowest


@dataclass(eq=False)
class KeptTokens:
    """The ids of the tokens that truncation kept in each of K distributions, concatenated.

    They stay on the CPU until they are scored. The lists are ragged because nuclei differ so much: most have a few
    tokens, some have most of a vocabulary of 150,000. In a rectangle every row would be as wide as the widest.
    """
    ids: Tensor     # (E,) int32
    counts: Tensor  # (K,) int64: number of ids of each distribution

    @classmethod
    def of(cls, mask: Tensor) -> "KeptTokens":
        """Builds KeptTokens from a mask (K, V) bool. Waits for the device."""
        _, ids = mask.nonzero(as_tuple=True)
        ids = ids.int().cpu()
        counts = mask.sum(1).cpu()
        return cls(ids, counts)

    @classmethod
    def join(cls, parts: "Sequence[KeptTokens]") -> "KeptTokens":
        """Concatenates the parts."""
        ids = torch.cat([part.ids for part in parts])
        counts = torch.cat([part.counts for part in parts])
        return cls(ids, counts)

    def __len__(self):
        return len(self.counts)

    def __getitem__(self, index):
        """Returns a copy of some distributions. index: (k,) integers or (K,) bool, on the CPU"""
        counts = self.counts[index]                                                  # (k,)
        ends = self.counts.cumsum(0)[index]                                          # (k,)
        begins = ends - counts
        # Slices, because an index tensor for all the ids would take more memory than the ids
        ids = [self.ids[:0]]  # torch.cat needs a tensor, even if no distribution is chosen
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            ids.append(self.ids[begin:end])
        return KeptTokens(torch.cat(ids), counts)

    def split(self, size: int | list[int]) -> "list[KeptTokens]":
        """Splits into parts of `size` distributions, the last with the remainder, or of the sizes in a list."""
        counts = self.counts.split(size)
        totals = [int(part.sum()) for part in counts]
        ids = self.ids.split(totals)
        return list(map(KeptTokens, ids, counts))

    def dense(
            self,
            vocabulary: int,
            device: torch.device | str = "cpu") -> Tensor:
        """Returns the mask (K, V) bool."""
        K = len(self)
        row = torch.arange(K).repeat_interleave(self.counts)                         # (E,)
        index = row * vocabulary + self.ids                                          # (E,) into the flattened mask
        index = index.to(device, non_blocking=True)
        flat = torch.zeros(K * vocabulary, dtype=torch.bool, device=device)
        flat.index_fill_(0, index, True)
        return flat.view(K, vocabulary)


class KeptCollector:
    """Collects kept tokens during sampling, and puts them in the order of the sampled tokens."""

    def __init__(self):
        self.numbers = []
        self.parts = []

    def add(self, numbers: Tensor, kept: KeptTokens) -> None:
        """Adds k distributions. numbers: (k,) on the CPU; the final order is by ascending number"""
        self.numbers.append(numbers)
        self.parts.append(kept)

    def joined(self) -> KeptTokens | None:
        """Returns all distributions by ascending number; None if there are none."""
        if not self.parts:
            return None
        kept = KeptTokens.join(self.parts)
        self.parts = []  # frees memory before the copy
        numbers = torch.cat(self.numbers)
        return kept[numbers.argsort()]
