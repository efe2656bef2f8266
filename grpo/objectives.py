"""The objectives as a table: each is an advantage, a ratio, a surrogate and an average. Adding one is adding a row."""

from dataclasses import dataclass

import torch

from grpo.kl import k3


@dataclass(frozen=True)
class Objective:
    """One published way to turn rewards into a gradient. clip_low and clip_high are the paper's, unless set."""
    formula: str                  # what is minimised, A the advantage, r the ratio, o a completion of |o| tokens
    paper: str                    # where it is from, and what differs here
    advantage: str                # a name in ADVANTAGES
    average: str                  # what a token's term is divided by: a branch of token_weights
    ratio: str = "token"          # "token", or "sequence": the geometric mean over the completion's tokens
    surrogate: str = "clip"       # a name in SURROGATES
    clip_low: float = 0.2
    clip_high: float = 0.2
    discriminative: bool = False  # whether it logs how well the policy tells good from bad (grpo/step_metrics.py)


OBJECTIVES = {
    "grpo": Objective(
        "-1/N sum_o 1/|o| sum_t min(r A, clip(r, 1 - low, 1 + high) A) + kl_beta KL",
        "arXiv 2402.03300 eq. 3; std with G - 1 and 1e-4 added, as TRL has it",
        advantage="group_std", average="sequence"),
    "dr_grpo": Objective(
        "-1/(N L) sum_o sum_t min(r A, clip(r) A), L = max_new_tokens (block_size in fill-in)",
        "arXiv 2503.20783: neither length nor std bias; the constant L instead of the paper's sum is that of its code",
        advantage="group_mean", average="constant", discriminative=True),
    "dapo": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r, 1 - low, 1 + high) A), high > low",
        "arXiv 2503.14476 eq. 8; its dynamic sampling is zero_std='resample', its overlong penalty overlong_buffer, "
        "and it has no KL: kl_beta=0",
        advantage="group_std", average="token", clip_high=0.28),
    "bnpo": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r) A)",
        "the loss that TRL names bnpo, not the Beta normalisation of arXiv 2506.02864; over the tokens of the whole "
        "step, where TRL takes those of one micro-batch and rank",
        advantage="group_std", average="token"),
    "gspo": Objective(
        "-1/N sum_o min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean_t log r_t)",
        "arXiv 2507.18071 eq. 5 and 7; its clipping range is that of its section 5.1",
        advantage="group_std", average="sequence", ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": Objective(
        "-1/(sum_o |o|) sum_o sum_t sg(clip(r, 1 - low, 1 + high)) A log p",
        "arXiv 2506.13585 eq. 4: the clipped ratio is a constant, so no token loses its gradient. The paper has no "
        "lower bound (clip_low=1) and gives no number for the upper, which is 1 + clip_high here as there and in verl; "
        "TRL and ScaleRL (arXiv 2510.13786) name the bound itself: their 5 is clip_high=4",
        advantage="group_std", average="token", surrogate="detached_ratio", clip_low=1.0, clip_high=4.0),
    "rloo": Objective(
        "-1/N sum_o sum_t min(r A, clip(r) A)",
        "arXiv 2402.14740: with one step per rollout exactly its REINFORCE with a leave-one-out baseline; the ratio "
        "and its clipping, per token, count only beyond",
        advantage="leave_one_out", average="sum"),
    "reinforce++": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r) A), A normalised over the whole step",
        "arXiv 2501.03262: no baseline per prompt; its KL is kl_in_reward=True, here summed over the completion "
        "instead of from each token on, and the step's mean and std are over completions instead of tokens",
        advantage="step", average="token"),
    "reinforce++_baseline": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r) A) + kl_beta KL, A = (reward - group mean) / step std",
        "arXiv 2501.03262, its form for several completions per prompt; its KL is kl_estimator='k2'",
        advantage="batch_std", average="token"),
    "plain": Objective(
        "-1/N sum_o sum_t min(r A, clip(r) A)",
        "this project's original: REINFORCE (Williams 1992) on summed log-probabilities, a baseline per input, one "
        "scale for the step",
        advantage="batch_std", average="sum"),
}
OBJECTIVES["drgrpo"] = OBJECTIVES["dr_grpo"]


def clip(r, clipped, logp, advantage, clip_cap):
    """min(r A, clip(r) A) of PPO (arXiv 1707.06347). With clip_cap=c the unclipped r is at most c: where A is negative,
    that is where the minimum takes it, the term is at least c A (dual clip, arXiv 1912.09729)."""
    bounded = r if clip_cap is None else r.clamp(max=clip_cap)
    return torch.min(bounded * advantage, clipped * advantage)


def detached_ratio(r, clipped, logp, advantage, clip_cap):
    """sg(clip(r)) A log p: the policy gradient with truncated importance weights (arXiv 2506.13585)."""
    return clipped.detach() * advantage * logp


SURROGATES = {"clip": clip, "detached_ratio": detached_ratio}


def token_weights(mask, average, max_new_tokens, total=lambda x: x):
    """How much each token counts in the loss of one optimizer step.

    mask:  (N, M) 1.0 where the loss sees the token
    total: sums a tensor over ranks; on one rank, the identity
    Returns (N, M): zero wherever mask is
    """
    N = total(torch.full((), float(len(mask)), device=mask.device)).clamp(min=1)
    if average == "sum":       # every completion's log-probability is a sum
        return mask / N
    if average == "sequence":  # every completion counts the same
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / N
    if average == "token":     # every token of the step counts the same
        return mask / total(mask.sum()).clamp(min=1)
    if average == "constant":  # every token counts the same in every step
        return mask / (N * max_new_tokens)
    raise ValueError(f"average={average!r}")


def policy_loss(logp, old_logp, advantage, weight, objective, clip_low=None, clip_high=None, clip_cap=None):
    """The loss of an objective, without KL and entropy: one scalar, the ratio, and metrics as sums over tokens.

    logp, old_logp: (N, M) log-probability of each chosen token, now and when it was chosen
    advantage:      (N, 1) of each completion, or (N, M) of each token
    weight:         (N, M) from token_weights, zero on padding
    objective:      a row of OBJECTIVES; clip_low, clip_high: None for its own; clip_cap: None for no cap
    Returns (), (N, M), {name: ()}
    """
    low = objective.clip_low if clip_low is None else clip_low
    high = objective.clip_high if clip_high is None else clip_high
    chosen = weight > 0                                                              # (N, M)
    log_ratio = torch.where(chosen, logp - old_logp, 0.0).clamp(-20, 20)             # (N, M)
    r = log_ratio.exp()                                                              # (N, M)
    if objective.ratio == "sequence":
        length = chosen.sum(1, keepdim=True).clamp(min=1)                            # (N, 1)
        used = (log_ratio.sum(1, keepdim=True) / length).exp().expand_as(r)          # (N, M)
    else:
        used = r
    clipped = used.clamp(1 - low, 1 + high)                                          # (N, M)
    term = SURROGATES[objective.surrogate](used, clipped, logp, advantage, clip_cap) # (N, M)
    loss = -torch.where(chosen, term * weight, 0.0).sum()                            # ()
    with torch.no_grad():
        metrics = {"clip_fraction": ((used != clipped) & chosen).sum(),
                   "kl_to_old": torch.where(chosen, k3(old_logp, logp), 0.0).sum()}
    return loss, r, metrics
