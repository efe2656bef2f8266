"""The zoo is a table: an objective is an advantage, a ratio and an average. Adding one is adding a row."""

from dataclasses import dataclass

import torch

from core.losses import k2, k3


@dataclass(frozen=True)
class Objective:
    advantage: str  # a name in ADVANTAGES
    average: str    # what a token's term is divided by: a branch of token_weights


OBJECTIVES = {
    "grpo": Objective(advantage="group_std", average="sequence"),      # arXiv 2402.03300: mean over tokens, then texts
    "dr_grpo": Objective(advantage="group_mean", average="constant"),  # arXiv 2503.20783: no length and no std bias
    "plain": Objective(advantage="batch_std", average="sum"),          # REINFORCE: log-probabilities are summed
}

KL_ESTIMATORS = {"k2": k2, "k3": k3}  # from sampled tokens; "exact" is a sum over the vocabulary (core/losses.py)


def token_weights(mask, average, max_new_tokens, total=lambda x: x):
    """How much each token counts in the loss of one optimizer step.

    mask:  (N, M) 1.0 where the policy chose the token
    total: sums a tensor over ranks; on one rank, the identity
    Returns (N, M): zero wherever mask is
    """
    N = total(torch.full((), float(len(mask)), device=mask.device))
    if average == "sum":       # every completion's log-probability is a sum
        return mask / N
    if average == "sequence":  # every completion counts the same
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / N
    if average == "constant":  # every token counts the same in every batch
        return mask / (N * max_new_tokens)
    raise ValueError(f"average={average!r}")


def policy_loss(logp, old_logp, advantage, weight, clip_low=0.2, clip_high=0.2):
    """The clipped surrogate -min(r A, clip(r) A) of PPO (arXiv 1707.06347): one scalar and its metrics.

    logp, old_logp: (N, M) log-probability of each chosen token, now and when it was chosen
    advantage:      (N, 1) of each completion, or (N, M) of each token
    weight:         (N, M) from token_weights, zero on padding
    """
    log_ratio = torch.where(weight > 0, logp - old_logp, 0.0).clamp(-20, 20)         # (N, M)
    r = log_ratio.exp()                                                              # (N, M)
    clipped = r.clamp(1 - clip_low, 1 + clip_high)                                   # (N, M)
    loss = -(torch.min(r * advantage, clipped * advantage) * weight).sum()           # ()
    with torch.no_grad():
        chosen = (weight > 0).float()
        metrics = {"clip_fraction": ((r != clipped) * chosen).sum()}
    return loss, metrics
