"""Distributions over tokens and the supervised loss of each mode. Everything in float32, in nats."""

import torch
from torch.nn import functional as F

from core.batch import masked_positions
from core.model import SEQUENCE_SCORER, at_least_float32


def sampling_logp(logits, temperature=1.0, top_p=1.0):
    """Log-probabilities of the distribution that is sampled from, so the one to score with too.

    logits: (..., V); temperature: a number, or a tensor that broadcasts against logits
    Returns (..., V): log-softmax of logits / temperature, renormalised over the nucleus, -inf outside it.
    """
    logp = (at_least_float32(logits) / temperature).log_softmax(-1)                  # (..., V)
    if top_p < 1:
        logp = logp.masked_fill(~nucleus(logp.detach(), top_p), -torch.inf).log_softmax(-1)
    return logp


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
