"""The supervised loss of each mode, as sums that add up over micro-batches and ranks."""

from torch.nn import functional as F

from core.distributions import in_parts, token_logp
from core.masking import masked_positions
from core.model import SEQUENCE_SCORER


def supervised_sums(model, input, target, mask):
    """Sums over the batch; divide by 'count' for means.

    input, target: (B, T), for a cls judge input (B, 1 + T)
    mask: (B, T) True where the loss counts, or its weights
    Returns {"loss", "correct", "count"}
    """
    if model.mode != SEQUENCE_SCORER:
        return token_sums(model, input, target, mask)
    if model.judge_head == "cls":
        return replaced_share_sums(model, input, target)
    return realness_sums(model, input, target)


def token_sums(model, input, target, mask):
    """Cross-entropy of the masked tokens, the logits in bounded memory."""
    position, hidden = masked_positions(mask > 0, input.device)                      # (B, M) each
    h = model.states(input, position)                                                # (B, M, C)
    target = target.gather(1, position)                                              # (B, M)

    def predicted(h, target):
        """Log-probability of each true token, and whether it is the likeliest one."""
        logp = model.project(h).log_softmax(-1)                                      # (K, V)
        return token_logp(logp, target), logp.argmax(-1) == target                   # (K,), (K,)

    logp, correct = in_parts(predicted, model.vocabulary, h.flatten(0, 1), target.flatten())
    weight = mask.float().to(input.device).gather(1, position)                       # (B, M)
    weight = weight.flatten() * hidden.flatten().to(input.device)                    # (B * M,)
    return {"loss": -(logp * weight).sum(),
            "correct": (correct * weight).sum(),
            "count": weight.sum()}


def realness_sums(model, input, target):
    """Binary cross-entropy of 'this token is the true one' at every position (replaced-token detection,
    arXiv 2003.10555)."""
    real = input == target                                                           # (B, T)
    logits = model(input)                                                            # (B, T)
    loss = F.binary_cross_entropy_with_logits(logits, real.float(), reduction="sum")
    return {"loss": loss,
            "correct": ((logits > 0) == real).sum(),
            "count": loss.new_full((), real.numel())}


def replaced_share_sums(model, input, target):
    """Squared error of a cls judge's estimate, whose target is y = x^4 - 2x^3 + 2x of the replaced share x of a text.

    input: (B, 1 + T), CLS and the filled text
    """
    x = (input[:, 1:] != target).float().mean(1)                                     # (B,)
    y = x**4 - 2 * x**3 + 2 * x                                                      # (B,)
    error = model(input).sigmoid() - y                                               # (B,)
    return {"loss": error.square().sum(),
            "correct": (error.abs() < 0.1).sum(),
            "count": error.new_full((), len(input))}
