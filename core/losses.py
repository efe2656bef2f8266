"""Distributions over tokens and the supervised loss of each mode. Everything in float32, in nats."""

import math

import torch
from torch.nn import functional as F

from core.batch import masked_positions
from core.model import SEQUENCE_SCORER, at_least_float32


def sampling_logp(logits, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """Log-probabilities of the distribution that is sampled from, so the one to score with too.

    logits: (..., V); temperature: a number, or a tensor that broadcasts against logits
    Returns (..., V): log-softmax of logits / temperature, renormalised over the tokens kept, -inf elsewhere.
    """
    logp = (at_least_float32(logits) / temperature).log_softmax(-1)                  # (..., V)
    if top_p < 1 or top_k or min_p > 0:
        logp = restrict(logp, kept_tokens(logp.detach(), top_p, top_k, min_p))
    return logp


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
    """logp: (..., V) log-probabilities; target: (...) ids. Returns (...)."""
    return logp.gather(-1, target[..., None]).squeeze(-1)


def entropy(logp):
    """Entropy of each distribution. logp: (..., V) -> (...)."""
    return -(logp.exp() * logp.clamp(min=-1e4)).sum(-1)


def exact_kl(logp, ref_logp):
    """KL(policy || reference) summed over the vocabulary, with its gradient. (..., V), (..., V) -> (...)."""
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def k2(logp, ref_logp):
    """(log ratio)^2 / 2 of sampled tokens: its gradient is in expectation that of the KL on-policy. (...) -> (...)."""
    return (logp - ref_logp).clamp(-20, 20).square() / 2


def k3(logp, ref_logp):
    """exp(x) - x - 1 with x = ref_logp - logp, never negative, unbiased as a value (arXiv 2402.03300 eq. 4)."""
    x = (ref_logp - logp).clamp(-20, 20)
    return x.exp() - x - 1


def replacement_target(share):
    """What a cls judge regresses on: y = x^4 - 2x^3 + 2x of the replaced share x of the content, 0 at 0 and 1 at 1."""
    return share**4 - 2 * share**3 + 2 * share


def supervised_sums(model, input, target, mask):
    """Sums over the batch that add up over micro-batches and ranks; divide by 'count' for means.

    input, target: (B, T); mask: (B, T) True where the loss counts
    Returns {"loss", "correct", "count"}: cross-entropy of the masked tokens; for a realness judge the binary
    cross-entropy of 'this token is the true one' at every position (replaced-token detection, arXiv 2003.10555); for a
    cls judge, whose input starts with CLS, the squared error of the replaced share's target.
    """
    if model.config.mode == SEQUENCE_SCORER and model.config.judge_head == "cls":
        share = (input[:, 1:] != target).float().mean(1)                             # (B,)
        error = model(input).sigmoid() - replacement_target(share)                   # (B,)
        return {"loss": error.square().sum(), "correct": (error.abs() < 0.1).sum(),
                "count": error.new_full((), len(input))}
    if model.config.mode == SEQUENCE_SCORER:
        real = input == target                                                       # (B, T)
        logits = model(input)                                                        # (B, T)
        loss = F.binary_cross_entropy_with_logits(logits, real.float(), reduction="sum")
        return {"loss": loss, "correct": ((logits > 0) == real).sum(), "count": logits.new_full((), real.numel())}
    position, chosen = masked_positions(mask, input.device)                          # (B, M)
    logp = model(input, position).log_softmax(-1)                                    # (B, M, V)
    target = target.gather(1, position)                                              # (B, M)
    return {"loss": -(token_logp(logp, target) * chosen).sum(),
            "correct": ((logp.argmax(-1) == target) * chosen).sum(), "count": chosen.sum()}
