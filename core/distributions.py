"""Distributions over tokens: what is drawn from, how it is drawn, and log-probabilities. In float32 and nats."""

import math

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from core.model import at_least_float32

SAMPLING = 1             # keeps this noise apart from the stream that draws problems (core/dataset_consumer.py)
LOGITS_AT_ONCE = 2**25   # most numbers in one tensor of logits


def sampling_logp(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """Log-probabilities of the distribution that is sampled from, and that sampled tokens are therefore scored with.

    logits: (..., V); temperature: a number, or a tensor that broadcasts against logits
    Returns (..., V): log-softmax of logits / temperature, renormalised over the tokens kept, -inf elsewhere.
    """
    logp = (at_least_float32(logits) / temperature).log_softmax(-1)                  # (..., V)
    if truncates(top_p, top_k, min_p):
        logp = restrict(logp, kept_tokens(logp.detach(), top_p, top_k, min_p))
    return logp


def truncates(top_p, top_k, min_p):
    """Whether these settings exclude any token from being drawn."""
    return top_p < 1 or top_k > 0 or min_p > 0


def restrict(logp, kept):
    """logp (..., V) renormalised over the tokens where kept (..., V) is true, -inf elsewhere; kept=None keeps all."""
    return logp if kept is None else logp.masked_fill(~kept, -torch.inf).log_softmax(-1)


def kept_tokens(logp, top_p=1.0, top_k=0, min_p=0.0):
    """Which tokens may be drawn: the top_k likeliest (0: all), of them the nucleus, of it those at least min_p times as
    likely as the likeliest (arXiv 2407.01082). logp: (..., V). Returns (..., V) bool."""
    kept = torch.ones_like(logp, dtype=torch.bool)
    if 0 < top_k < logp.shape[-1]:
        kept = torch.zeros_like(kept).scatter(-1, logp.topk(top_k, dim=-1).indices, True)
    if top_p < 1:
        kept = kept & nucleus(restrict(logp, kept), top_p)
    if min_p > 0:
        kept = kept & (logp >= logp.amax(-1, keepdim=True) + math.log(min_p))
    return kept


def nucleus(logp, top_p):
    """The smallest set of most likely tokens whose probability reaches top_p (arXiv 1904.09751). (..., V) bool."""
    ordered, order = logp.exp().sort(dim=-1, descending=True, stable=True)           # (..., V)
    kept = ordered.cumsum(-1) - ordered < top_p                                      # (..., V) mass before it < top_p
    kept[..., 0] = True
    return torch.zeros_like(kept).scatter(-1, order, kept)


def token_logp(logp, target):
    """Log-probability of each token. logp: (..., V); target: (...) ids. Returns (...)."""
    return logp.gather(-1, target[..., None]).squeeze(-1)


def entropy(logp):
    """Entropy of each distribution. logp: (..., V) -> (...)."""
    return -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)


def draw_uniforms(seed, step, numbers, shape):
    """Uniform noise in [0, 1), float64, (len(numbers), *shape), on the CPU.

    Row i depends on (seed, step, numbers[i]) alone: a problem's samples are the same on every device, in whatever
    batch, micro-batch or rank it is drawn.
    """
    rows = [np.random.default_rng([SAMPLING, seed, step, int(number)]).random(shape) for number in numbers]
    return torch.from_numpy(np.stack(rows))


def sample_from(logp, uniform):
    """Inverse-CDF sampling: a token is drawn where the cumulative probability first exceeds the noise.

    logp: (P, M, V) log-probabilities; uniform: (P, G, M) in [0, 1)
    Returns ids (P, G, M), never one of probability 0
    """
    cdf = logp.to(uniform.device).double().exp().cumsum(-1)                          # (P, M, V)
    u = uniform.transpose(1, 2).contiguous() * cdf[..., -1:]                         # (P, M, G) below the last one
    return torch.searchsorted(cdf, u, right=True).to(logp.device).transpose(1, 2)    # (P, G, M)


def in_parts(function, vocabulary, *tensors):
    """function(*tensors) on few enough rows at a time that its logits stay below LOGITS_AT_ONCE numbers.

    function: tensors of K rows (or None) -> a tuple of tensors of K rows. Where it is cut, the backward pass computes
    each part again instead of keeping it, so that memory is bounded in both directions.
    """
    K, size = len(tensors[0]), max(1, LOGITS_AT_ONCE // vocabulary)
    if K <= size:
        return function(*tensors)
    parts = zip(*([None] * -(-K // size) if x is None else x.split(size) for x in tensors), strict=True)
    return tuple(map(torch.cat, zip(*(checkpoint(function, *part, use_reentrant=False) for part in parts))))
