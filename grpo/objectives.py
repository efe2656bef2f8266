"""The table of objectives. Each is an advantage, a ratio, a surrogate and an average; a new one is a new row."""

import math
from dataclasses import dataclass

import torch

from grpo.kl import k3

AVERAGES = ("sum", "sequence", "token", "constant")  # branches of token_weights
RATIOS = ("token", "sequence")                       # branches of policy_loss


@dataclass(frozen=True)
class Objective:
    """One published way to turn rewards into a gradient."""
    formula: str                  # the loss: A is the advantage, r the ratio, o a completion of |o| tokens
    paper: str                    # where it comes from, and how this version differs
    advantage: str                # a name in ADVANTAGES
    average: str                  # what the term of a token is divided by: a name in AVERAGES
    ratio: str = "token"          # a name in RATIOS; "sequence": the geometric mean over the completion's tokens
    surrogate: str = "clip"       # a name in SURROGATES
    clip_low: float = 0.2         # the ratio is at least 1 - clip_low, as in the paper; a setting can replace it.
                                  # probability_mask bounds p - p_old in place of the ratio minus 1
    clip_high: float = 0.2        # the ratio is at most 1 + clip_high, likewise
    discriminative: bool = False  # whether discriminative_sums (grpo/step_metrics.py) is logged


OBJECTIVES = {
    "grpo": Objective(
        "-1/N sum_o 1/|o| sum_t min(r A, clip(r, 1 - low, 1 + high) A) + kl_beta KL",
        "arXiv 2402.03300 eq. 3; the std of G - 1, plus 1e-4, as in TRL",
        advantage="group_std", average="sequence"),
    "dr_grpo": Objective(
        "-1/(N L) sum_o sum_t min(r A, clip(r) A), L = max_new_tokens (block_size in fill-in)",
        "arXiv 2503.20783: no bias from lengths or std; L is from its code",
        advantage="group_mean", average="constant", discriminative=True),
    "dapo": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r, 1 - low, 1 + high) A), high > low",
        "arXiv 2503.14476 eq. 8, with zero_std='resample', overlong_buffer and kl_beta=0",
        advantage="group_std", average="token", clip_high=0.28),
    "bnpo": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r) A)",
        "TRL's bnpo; the sums are over all tokens of the step, in TRL over those of one micro-batch and rank",
        advantage="group_std", average="token"),
    "gspo": Objective(
        "-1/N sum_o min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean_t log r_t)",
        "arXiv 2507.18071 in the token form of its section 4.3, with the clipping range of section 5.1",
        advantage="group_std", average="sequence", ratio="sequence", clip_low=3e-4, clip_high=4e-4),
    "luspo": Objective(
        "-1/N sum_o |o| min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean_t log r_t)",
        "arXiv 2602.05261: gspo without the bias towards short completions, in the same token form",
        advantage="group_std", average="sum", ratio="sequence", clip_low=2e-3, clip_high=2.5e-3),
    "dppo": Objective(
        "-1/(N L) sum_o sum_t M r A; M = 0 where A > 0 and p > p_old + high, or A < 0 and p < p_old - low, else 1",
        "arXiv 2602.04879, Binary-TV mask, advantage, average and bounds of its code; with ratio_to='sampler'",
        advantage="group_mean", average="constant", surrogate="probability_mask", clip_low=0.15, clip_high=0.15),
    "cispo": Objective(
        "-1/(sum_o |o|) sum_o sum_t sg(clip(r, 1 - low, 1 + high)) A log p",
        "arXiv 2506.13585 eq. 4, without a lower bound (clip_low=1); TRL's and ScaleRL's 5 is clip_high=4",
        advantage="group_std", average="token", surrogate="detached_ratio", clip_low=1.0, clip_high=4.0),
    "rloo": Objective(
        "-1/N sum_o sum_t min(r A, clip(r) A)",
        "arXiv 2402.14740; the ratio and its clipping, per token, matter only with several steps per rollout",
        advantage="leave_one_out", average="sum"),
    "reinforce++": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r) A), A normalised over the whole step",
        "arXiv 2501.03262 with kl_in_reward=True; KL, mean and std are those of completions instead of tokens",
        advantage="step", average="token"),
    "reinforce++_baseline": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r) A) + kl_beta KL, A = (reward - group mean) / step std",
        "arXiv 2501.03262, its version for several completions per prompt; its KL is kl_estimator='k2'",
        advantage="batch_std", average="token"),
    "plain": Objective(
        "-1/N sum_o sum_t min(r A, clip(r) A)",
        "REINFORCE (Williams 1992) with a baseline per input and one std for the step",
        advantage="batch_std", average="sum"),
}
OBJECTIVES["drgrpo"] = OBJECTIVES["dr_grpo"]


def baseline_of(config):
    """A name in ADVANTAGES: the setting, or what pass@k or normalised rewards need, or the objective's own."""
    if config.advantage is not None:
        return config.advantage
    if config.train_pass_k > 1:
        return "leave_one_out"
    if config.reward_normalisation == "group":
        return "batch_std"
    return OBJECTIVES[config.objective].advantage


def clip(r, low, high, logp, advantage):
    """min(r A, clip(r) A) of PPO (arXiv 1707.06347)."""
    clipped = r.clamp(1 - low, 1 + high)
    return torch.min(r * advantage, clipped * advantage)


def detached_ratio(r, low, high, logp, advantage):
    """sg(clip(r)) A log p: the policy gradient with truncated importance weights (arXiv 2506.13585)."""
    return r.clamp(1 - low, 1 + high).detach() * advantage * logp


def probability_mask(r, low, high, logp, advantage):
    """r A, but 0 where A pulls the token's probability p away from p_old = p / r, and p is more than high above it or
    more than low below it (arXiv 2602.04879)."""
    p = logp.detach().exp()
    moved = p - p / r.detach()                                                       # p - p_old
    too_high = (moved > high) & (advantage > 0)
    too_low = (moved < -low) & (advantage < 0)
    return (r * advantage).masked_fill(too_high | too_low, 0.0)


SURROGATES = {"clip": clip, "detached_ratio": detached_ratio, "probability_mask": probability_mask}


def token_weights(mask, average, max_new_tokens, total=lambda x: x):
    """The weight of each token in the loss of one optimizer step.

    mask:  (N, M) 1.0 where the token is in the loss
    total: sums a tensor over ranks; on one rank, the identity
    Returns (N, M), zero where the mask is zero. N counts the completions with a token in the loss
    """
    N = total(mask.any(1).to(mask.dtype).sum()).clamp(min=1)
    if average == "sum":       # the log-probability of a completion is the sum over its tokens
        return mask / N
    if average == "sequence":  # every completion counts the same
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / N
    if average == "token":     # every token of the step counts the same
        return mask / total(mask.sum()).clamp(min=1)
    if average == "constant":  # every token counts the same in every step
        return mask / (N * max_new_tokens)
    raise ValueError(f"average={average!r}")


def policy_loss(logp, old_logp, advantage, weight, objective, clip_low=None, clip_high=None):
    """The loss of an objective, without KL and entropy.

    logp, old_logp: (N, M) log-probability of each sampled token, now and when it was sampled
    advantage:      (N, 1) of each completion, or (N, M) of each token
    weight:         (N, M) from token_weights, zero on padding
    objective:      a row of OBJECTIVES; clip_low, clip_high: None for its own
    Returns the loss (), the ratio per token (N, M), and metrics {name: ()} as sums over tokens
    """
    low = objective.clip_low if clip_low is None else clip_low
    high = objective.clip_high if clip_high is None else clip_high
    counted = weight > 0                                                             # (N, M)
    log_ratio = torch.where(counted, logp - old_logp, 0.0).clamp(-20, 20)            # (N, M)
    r = log_ratio.exp()                                                              # (N, M)
    if objective.ratio == "sequence":
        length = counted.sum(1, keepdim=True).clamp(min=1)                           # (N, 1)
        mean = (log_ratio.sum(1, keepdim=True) / length).detach()                    # (N, 1)
        used = (mean + log_ratio - log_ratio.detach()).exp()                         # (N, M)
    else:
        used = r
    surrogate = SURROGATES[objective.surrogate]
    term = surrogate(used, low, high, logp, advantage)                               # (N, M)
    loss = -torch.where(counted, term * weight, 0.0).sum()                           # ()
    with torch.no_grad():
        unclipped = surrogate(used, math.inf, math.inf, logp, advantage)             # (N, M)
        changed = term != unclipped
        metrics = {"clip_fraction": (changed & counted).sum(),
                   "kl_to_old": torch.where(counted, k3(old_logp, logp), 0.0).sum()}
    return loss, r, metrics
