"""The supervised loss of each mode, as sums that add up over micro-batches and ranks."""

import torch
from torch.nn import functional as F

from core.distributions import in_parts, token_logp
from core.masking import masked_positions
from core.model import SEQUENCE_SCORER


def replacement_target(share):
    """The value that a cls judge learns: y = x^4 - 2x^3 + 2x of the replaced share x of the content, from 0 to 1."""
    return share**4 - 2 * share**3 + 2 * share


def supervised_sums(model, input, target, mask):
    """Sums over the batch; divide by 'count' for means.

    input, target: (B, T); mask: (B, T) True where the loss counts
    Returns {"loss", "correct", "count"}: cross-entropy of the masked tokens; for a realness judge the binary
    cross-entropy of 'this token is the true one' at every position (replaced-token detection, arXiv 2003.10555); for a
    cls judge, whose input starts with CLS, the squared error of the replaced share's target.
    """
    if model.mode == SEQUENCE_SCORER and model.judge_head == "cls":
        share = (input[:, 1:] != target).float().mean(1)                             # (B,)
        error = model(input).sigmoid() - replacement_target(share)                   # (B,)
        return {"loss": error.square().sum(), "correct": (error.abs() < 0.1).sum(),
                "count": error.new_full((), len(input))}
    if model.mode == SEQUENCE_SCORER:
        real = input == target                                                       # (B, T)
        logits = model(input)                                                        # (B, T)
        loss = F.binary_cross_entropy_with_logits(logits, real.float(), reduction="sum")
        return {"loss": loss, "correct": ((logits > 0) == real).sum(), "count": loss.new_full((), real.numel())}
    position, chosen = masked_positions(mask, input.device)                          # (B, M)
    h, target = model.states(input, position), target.gather(1, position)            # (B, M, C), (B, M)

    def predicted(h, target):
        """Log-probability of each true token, and whether it is the likeliest one."""
        logp = model.project(h).log_softmax(-1)                                      # (K, V)
        return token_logp(logp, target), logp.argmax(-1) == target                   # (K,), (K,)

    logp, correct = in_parts(predicted, model.vocabulary, h.flatten(0, 1), target.flatten())
    chosen = chosen.flatten()                                                        # (B * M,)
    return {"loss": -(logp * chosen).sum(), "correct": (correct * chosen).sum(), "count": chosen.sum()}
