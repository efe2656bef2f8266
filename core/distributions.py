"""Distributions over tokens: drawing, log-probabilities and entropy. In float32 and nats."""

import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.device import gpu_logits_at_once

if TYPE_CHECKING:
    from core.truncation import KeptTokens

SAMPLING = 1               # the first number of the seeds here, so that the noise differs from that of other files
LOGITS_AT_ONCE = 2**25     # most numbers in one tensor of logits on a CPU


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
        from core.truncation import KeptTokens, kept_tokens
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
