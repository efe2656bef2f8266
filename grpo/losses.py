"""The tables of the loss: advantages, objectives and KL estimators, with the formula and the paper of each row.

An objective is an advantage, a ratio, a surrogate and an average; a new objective is a new row of OBJECTIVES.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.errors import Mistake, calling, definition, others, parameters_of

if TYPE_CHECKING:
    from grpo.rollout import Rollouts, Scores

AVERAGES = ("sum", "sequence", "token", "constant")  # branches of token_weights
RATIOS = ("token", "sequence")                       # branches of policy_loss


# Advantages: how much better a completion is than a baseline, the mean of its group or of the step

def centred(reward: Tensor, mask: Tensor) -> tuple:
    """Returns the rewards minus the group mean, and the number of rewards in the group. Only rewards with mask 1 count.

    reward, mask: (P, G, 1 or M)
    Returns (P, G, 1 or M) and (P, 1, 1 or M)
    """
    count = mask.sum(1, keepdim=True)
    total = (reward * mask).sum(1, keepdim=True)
    mean = total / count.clamp(min=1)                                                # (P, 1, 1 or M)
    away = reward - mean
    # The mean of equal rewards is rounded: 0.1 minus the mean may be 1e-9, and a division by the tiny standard
    # deviation would make that an advantage. The difference of highest and lowest is exactly 0
    out = mask == 0
    highest = reward.masked_fill(out, -torch.inf).amax(1, keepdim=True)
    lowest = reward.masked_fill(out, torch.inf).amin(1, keepdim=True)
    away = away.masked_fill(highest <= lowest, 0.0)
    return away * mask, count


def over_std(x: Tensor, squares: Tensor, count: Tensor) -> Tensor:
    """x / (std + 1e-4) with std = sqrt(squares / (count - 1)). squares: the sum of the squares of `count` numbers"""
    variance = squares / (count - 1).clamp(min=1)
    return x / (variance.sqrt() + 1e-4)


def group_std(reward: Tensor, mask: Tensor, total: Callable) -> Tensor:
    """(r - mean) / (std + 1e-4) within the group: GRPO, arXiv 2402.03300 section 4.1.2. The variance is divided by
    G - 1, as in TRL."""
    x, count = centred(reward, mask)
    return over_std(x, x.square().sum(1, keepdim=True), count)


def group_mean(reward: Tensor, mask: Tensor, total: Callable) -> Tensor:
    """r - mean of the group: Dr. GRPO, arXiv 2503.20783."""
    x, _ = centred(reward, mask)
    return x


def leave_one_out(reward: Tensor, mask: Tensor, total: Callable) -> Tensor:
    """r - mean of the other completions of the group: RLOO, arXiv 2402.14740. It is G / (G - 1) times group_mean."""
    x, count = centred(reward, mask)
    return x * count / (count - 1).clamp(min=1)


def batch_std(reward: Tensor, mask: Tensor, total: Callable) -> Tensor:
    """(r - mean of the group) / (std + 1e-4); the std of these differences is over the whole step and all ranks."""
    x, _ = centred(reward, mask)
    return over_std(x, total(x.square().sum()), total(mask.sum()))


def max_rl(reward: Tensor, mask: Tensor, total: Callable) -> Tensor:
    """(r - mean) / mean within the group, 0 where no completion is correct: MaxRL, arXiv 2602.02710. With rewards of
    0 and 1 the expected gradient is the gradient of sum_k pass@k / k, k from 1 to G - 1."""
    reward = reward * mask
    if (reward < 0).any():
        raise Mistake(f"advantage='max_rl' is for rewards of success, 0 or 1, but one is {reward.min():g}")
    x, count = centred(reward, mask)
    mean = reward.sum(1, keepdim=True) / count.clamp(min=1)
    return x / mean.masked_fill(mean == 0, 1.0)


def step(reward: Tensor, mask: Tensor, total: Callable) -> Tensor:
    """(r - mean) / (std + 1e-4), both over the whole step and all ranks: REINFORCE++, arXiv 2501.03262."""
    count = total(mask.sum())
    mean = total((reward * mask).sum()) / count.clamp(min=1)
    x = (reward - mean) * mask
    # Equal rewards leave rounding errors, all of one sign: set them to 0. NaN and infinity stay: the step is skipped
    above = total((x > 0).sum())
    below = total((x < 0).sum())
    equal = (above == 0) | (below == 0)
    x = x.masked_fill(equal & x.isfinite(), 0.0)
    return over_std(x, total(x.square().sum()), count)


ADVANTAGES = {
    "group_std": group_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
    "gdpo": batch_std,  # grpo/shaping.py normalises each reward first: GDPO, arXiv 2601.05242
    "max_rl": max_rl,
    "step": step,
}


def compute_advantages(reward: Tensor, name: str, mask: Tensor | None = None, total: Callable = lambda x: x) -> Tensor:
    """The advantage of each completion, or of each token, by the function `name` of ADVANTAGES.

    reward: (P, G, 1) one reward per completion, or (P, G, M) one per token
    mask:   the same shape, 0.0 on padding and on completions that were not scored: they do not count in any baseline
    Returns the same shape; exactly 0 in a group of equal rewards (`step`: in a step of equal rewards)
    """
    if mask is None:
        mask = torch.ones_like(reward)
    return ADVANTAGES[name](reward, mask, total) * mask


# Objectives

@dataclass(frozen=True)
class Objective:
    """One published way to turn rewards into a gradient."""
    formula: str                  # the loss: A is the advantage, r the ratio, o a completion of |o| tokens
    paper: str                    # where it comes from, and how this version differs
    advantage: str                # a name in ADVANTAGES
    average: str                  # the divisor of a token's term: a name in AVERAGES
    ratio: str = "token"          # a name in RATIOS; "sequence": the geometric mean over the completion's tokens
    surrogate: str = "clip"       # a name in SURROGATES
    clip_low: float | None = 0.2  # the ratio is at least 1 - clip_low; probability_mask: p - p_old is; None: no bounds
    clip_high: float | None = 0.2  # the ratio is at most 1 + clip_high, likewise
    constants: dict = field(default_factory=dict)  # further parameters of the surrogate: {name: number}
    discriminative: bool = False  # log how well log-probabilities separate better completions (grpo/metrics.py)
    # Settings beside the papers' rows
    entropy_bonus: float = 0.0        # weight of the entropy: the loss raises it
    kl_estimator: str | None = None   # a name in KL_ESTIMATORS; None: k3


OBJECTIVES = {
    "grpo": Objective(
        "-1/N sum_o 1/|o| sum_t min(r A, clip(r, 1 - low, 1 + high) A) + kl_beta KL",
        "arXiv 2402.03300 eq. 3; the std of G - 1, plus 1e-4, as in TRL",
        advantage="group_std",
        average="sequence"),
    "dr_grpo": Objective(
        "-1/(N L) sum_o sum_t min(r A, clip(r) A), L = max_new_tokens (block_size in fill-in)",
        "arXiv 2503.20783: no bias from lengths or std; L is from its code",
        advantage="group_mean",
        average="constant",
        discriminative=True),
    "dapo": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r, 1 - low, 1 + high) A), high > low",
        "arXiv 2503.14476 eq. 8, with zero_std='resample', overlong_buffer and kl_beta=0",
        advantage="group_std",
        average="token",
        clip_high=0.28),
    "bnpo": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r) A)",
        "TRL's bnpo; the sums are over all tokens of the step, in TRL over those of one micro-batch and rank",
        advantage="group_std",
        average="token"),
    "gspo": Objective(
        "-1/N sum_o min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean_t log r_t)",
        "arXiv 2507.18071 in the token form of its section 4.3, with the clipping range of section 5.1",
        advantage="group_std",
        average="sequence",
        ratio="sequence",
        clip_low=3e-4,
        clip_high=4e-4),
    "luspo": Objective(
        "-1/N sum_o |o| min(s A, clip(s, 1 - low, 1 + high) A), s = exp(mean_t log r_t)",
        "arXiv 2602.05261: gspo without the bias towards short completions, in the same token form",
        advantage="group_std",
        average="sum",
        ratio="sequence",
        clip_low=2e-3,
        clip_high=2.5e-3),
    "dppo": Objective(
        "-1/(N L) sum_o sum_t M r A; M = 0 where A > 0 and p > p_old + high, or A < 0 and p < p_old - low, else 1",
        "arXiv 2602.04879, Binary-TV mask, advantage, average and bounds of its code; with ratio_to='sampler'",
        advantage="group_mean",
        average="constant",
        surrogate="probability_mask",
        clip_low=0.15,
        clip_high=0.15),
    "cispo": Objective(
        "-1/(sum_o |o|) sum_o sum_t sg(clip(r, 1 - low, 1 + high)) A log p",
        "arXiv 2506.13585 eq. 4, without a lower bound (clip_low=1); TRL's and ScaleRL's 5 is clip_high=4",
        advantage="group_std",
        average="token",
        surrogate="detached_ratio",
        clip_low=1.0,
        clip_high=4.0),
    "sapo": Objective(
        "-1/N sum_o 1/|o| sum_t 4 / tau sigmoid(tau (r - 1)) A; tau = tau_pos where A > 0, else tau_neg",
        "arXiv 2511.20347: a soft gate in place of the clip, which closes earlier where A < 0",
        advantage="group_std",
        average="sequence",
        surrogate="sigmoid_gate",
        clip_low=None,
        clip_high=None,
        constants={"tau_pos": 1.0, "tau_neg": 1.05}),
    "dro": Objective(
        "-1/(sum_o |o|) sum_o sum_t (A log p - beta / 2 (log r)^2)",
        "arXiv 2405.19107 with p_old as its reference and the mean of the group as its value, per token as in verl and "
        "Tinker; beta is one of Tinker's, verl has none of its own",
        advantage="group_mean",
        average="token",
        surrogate="log_ratio_penalty",
        clip_low=None,
        clip_high=None,
        constants={"beta": 0.05}),
    "rloo": Objective(
        "-1/N sum_o sum_t min(r A, clip(r) A)",
        "arXiv 2402.14740; the ratio and its clipping, per token, matter only with several steps per rollout",
        advantage="leave_one_out",
        average="sum"),
    "reinforce++": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r) A), A normalised over the whole step",
        "arXiv 2501.03262 with kl_in_reward=True; KL, mean and std are those of completions instead of tokens",
        advantage="step",
        average="token"),
    "reinforce++_baseline": Objective(
        "-1/(sum_o |o|) sum_o sum_t min(r A, clip(r) A) + kl_beta KL, A = (reward - group mean) / step std",
        "arXiv 2501.03262, its version for several completions per prompt; its KL is kl_estimator='k2'",
        advantage="batch_std",
        average="token"),
    "plain": Objective(
        "-1/N sum_o sum_t min(r A, clip(r) A)",
        "REINFORCE (Williams 1992) with a baseline per input and one std for the step",
        advantage="batch_std",
        average="sum"),
}
OBJECTIVES["drgrpo"] = OBJECTIVES["dr_grpo"]


def clip(r: Tensor, low: float, high: float, logp: Tensor, advantage: Tensor) -> Tensor:
    """min(r A, clip(r) A) of PPO (arXiv 1707.06347)."""
    clipped = r.clamp(1 - low, 1 + high)
    return torch.min(r * advantage, clipped * advantage)


def detached_ratio(r: Tensor, low: float, high: float, logp: Tensor, advantage: Tensor) -> Tensor:
    """sg(clip(r)) A log p: the policy gradient with truncated importance weights (arXiv 2506.13585)."""
    return r.clamp(1 - low, 1 + high).detach() * advantage * logp


def probability_mask(r: Tensor, low: float, high: float, logp: Tensor, advantage: Tensor) -> Tensor:
    """r A, but 0 where A would move the token's probability p further from p_old = p / r, and p is already more than
    high above it or more than low below it (arXiv 2602.04879)."""
    p = logp.detach().exp()
    moved = p - p / r.detach()                                                       # p - p_old
    too_high = (moved > high) & (advantage > 0)
    too_low = (moved < -low) & (advantage < 0)
    return (r * advantage).masked_fill(too_high | too_low, 0.0)


def sigmoid_gate(
        r: Tensor,
        low: float | None,
        high: float | None,
        logp: Tensor,
        advantage: Tensor,
        tau_pos: float,
        tau_neg: float) -> Tensor:
    """4 / tau sigmoid(tau (r - 1)) A. At r = 1 it has the gradient of A log p; away from 1 the gradient fades
    (arXiv 2511.20347)."""
    tau = torch.full_like(advantage, tau_neg).masked_fill(advantage > 0, tau_pos)
    gate = torch.sigmoid(tau * (r - 1))
    return 4 / tau * gate * advantage


def log_ratio_penalty(
        r: Tensor,
        low: float | None,
        high: float | None,
        logp: Tensor,
        advantage: Tensor,
        beta: float) -> Tensor:
    """A log p - beta / 2 (log r)^2 (arXiv 2405.19107)."""
    return advantage * logp - beta / 2 * r.log().square()


SURROGATES = {  # functions of the ratio, the bounds, log p, the advantage, and the constants of a row
    "clip": clip,
    "detached_ratio": detached_ratio,
    "probability_mask": probability_mask,
    "sigmoid_gate": sigmoid_gate,
    "log_ratio_penalty": log_ratio_penalty,
}


def token_weights(mask: Tensor, average: str, max_new_tokens: int, total: Callable = lambda x: x) -> Tensor:
    """The weight of each token in the loss of one optimizer step.

    mask:  (N, M) 1.0 where the token is in the loss
    total: sums a tensor over ranks; on one rank, the identity
    Returns (N, M), zero where the mask is zero. N counts the completions with a token in the loss
    """
    has_token = mask.any(1).to(mask.dtype)                                           # (N,)
    N = total(has_token.sum()).clamp(min=1)
    if average == "sum":       # the log-probability of a completion is the sum over its tokens
        return mask / N
    if average == "sequence":  # every completion counts the same
        length = mask.sum(1, keepdim=True).clamp(min=1)                              # (N, 1)
        return mask / length / N
    if average == "token":     # every token of the step counts the same
        tokens = total(mask.sum()).clamp(min=1)
        return mask / tokens
    assert average == "constant", average  # every token counts the same in every step
    return mask / (N * max_new_tokens)


@torch.enable_grad()
def check_row(name: str) -> None:
    """Raises Mistake unless the surrogate of a row of OBJECTIVES takes the row's bounds and constants, takes infinite
    bounds, and returns a term for each token or completion."""
    row = OBJECTIVES[name]
    surrogate = SURROGATES[row.surrogate]
    logp = -torch.ones(2, 3, requires_grad=True)
    r = (logp - logp.detach()).exp()
    advantage = torch.tensor([[1.0], [-1.0]])
    what = f"the surrogate {row.surrogate!r} does not take the bounds and constants {row.constants} of {name!r}"
    for low, high in ((row.clip_low, row.clip_high), (math.inf, math.inf)):  # policy_loss calls it with both
        with others(what, f"correct the row of objective={name!r}", definition(surrogate), ours_too=True):
            term = surrogate(r, low, high, logp, advantage, **row.constants)
        fits = isinstance(term, Tensor) and term.shape in ((2, 3), (2, 1))
        if not fits or not term.requires_grad:
            raise Mistake(f"{definition(surrogate)}: the surrogate {row.surrogate!r} of objective={name!r} must return "
                          "a tensor with a term of each token, (N, M), or of each completion, (N, 1), and its gradient")


def policy_loss(
        logp: Tensor,       # (N, M) log-probability of each sampled token, now
        old_logp: Tensor,   # (N, M) the same under the proximal policy
        advantage: Tensor,  # (N, 1) of each completion, or (N, M) of each token
        weight: Tensor,     # (N, M) from token_weights, zero on padding
        objective: Objective) -> tuple:
    """The loss of an objective, a row of OBJECTIVES, without KL and entropy.

    Returns the loss (), the ratio per token (N, M), and (N, M) bool: where the bounds changed the term
    """
    counted = weight > 0                                                             # (N, M)
    log_ratio = torch.where(counted, logp - old_logp, 0.0).clamp(-20, 20)            # (N, M)
    token_ratio = log_ratio.exp()                                                    # (N, M)
    r = token_ratio
    if objective.ratio == "sequence":
        # GSPO-token: the value of the sequence's ratio, with the gradient of each token's ratio
        length = counted.sum(1, keepdim=True).clamp(min=1)                           # (N, 1)
        mean = (log_ratio.sum(1, keepdim=True) / length).detach()                    # (N, 1)
        r = (mean + log_ratio - log_ratio.detach()).exp()                            # (N, M)

    surrogate = SURROGATES[objective.surrogate]
    constants = objective.constants
    with calling(surrogate, f"the surrogate {objective.surrogate!r} failed"):
        low = objective.clip_low
        high = objective.clip_high
        term = surrogate(r, low, high, logp, advantage, **constants)                 # (N, M)
    # torch.where, not a product: outside the mask a term may be infinite, and 0 * inf is NaN
    loss = -torch.where(counted, term * weight, 0.0).sum()                           # ()
    with torch.no_grad():
        unclipped = surrogate(r, math.inf, math.inf, logp, advantage, **constants)   # (N, M)
        clipped = (term != unclipped) & counted                                      # (N, M)
    return loss, token_ratio, clipped


# The KL divergence to a reference or teacher

def exact_kl(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KL(policy || reference) summed over the vocabulary, with its gradient. (..., V), (..., V) -> (...)."""
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """(log ratio)^2 / 2 of sampled tokens. On-policy its expected gradient is the KL's gradient. (...) -> (...)."""
    return (logp - ref_logp).clamp(-20, 20).square() / 2


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """exp(x) - x - 1 with x = ref_logp - logp, never negative, unbiased as a value (arXiv 2402.03300 eq. 4)."""
    x = (ref_logp - logp).clamp(-20, 20)
    return x.expm1() - x  # exp(x) - x - 1 would round to values below 0 where the policies are close


def k2_weighted(logp: Tensor, ref_logp: Tensor, ratio: Tensor) -> Tensor:
    """sg(r) k2: k2 has the gradient of the KL already, so the ratio is a constant (arXiv 2510.01555)."""
    return ratio.detach() * k2(logp, ref_logp)


# Functions of the sampled tokens' log-probabilities (N, M) under the policy, with gradient, and under the reference.
# They return an estimate of the KL of each token (N, M), which is multiplied by the ratio to the sampling policy, with
# its gradient: E[r k3] is the KL. A function with a parameter `ratio` (N, M) weighs its estimate itself.
KL_ESTIMATORS = {
    "exact": None,  # no estimate: exact_kl over the vocabulary
    "k2": k2_weighted,
    "k3": k3,
}


def estimate_kl(name: str, logp: Tensor, ref_logp: Tensor, ratio: Tensor) -> Tensor:
    """The KL of each token (N, M) in the loss, by an estimator of KL_ESTIMATORS."""
    estimator = KL_ESTIMATORS[name]
    named = f"kl_estimator={name!r}"
    takes_ratio = "ratio" in parameters_of(estimator, named)
    with calling(estimator, f"{named} failed"):
        if takes_ratio:
            kl = estimator(logp, ref_logp, ratio=ratio)
        else:
            kl = estimator(logp, ref_logp)
    if not isinstance(kl, Tensor) or kl.shape != logp.shape:
        raise Mistake(f"{definition(estimator)}: {named} must return a tensor with the KL of each token, (N, M)")
    if takes_ratio:
        return kl
    return ratio * kl


@torch.enable_grad()
def check_estimator(name: str) -> None:
    """Raises Mistake unless the function of an estimator, a name in KL_ESTIMATORS, returns a KL of each token."""
    estimator = KL_ESTIMATORS[name]
    if estimator is None:
        return
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    ratio = (logp - logp.detach()).exp()
    kl = estimate_kl(name, logp, logp.detach() - 0.5, ratio)
    if not kl.requires_grad or not kl.isfinite().all():
        raise Mistake(f"{definition(estimator)}: kl_estimator={name!r} must return finite numbers with their gradient")


def kl_per_token(
        scores: "Scores",
        rollouts: "Rollouts",
        estimator: str | None,
        ratio: Tensor | None = None) -> Tensor | None:
    """The KL of each token (N, M), exact if the reference's distributions are known; None without a reference.

    scores: of the trained policy; estimator: a name in KL_ESTIMATORS; None: k3
    ratio: (N, M) to the sampling policy, as importance weights; None outside of training
    """
    if rollouts.ref_logp is None:
        return scores.kl
    if ratio is None:
        ratio = torch.ones_like(scores.logp)
    return estimate_kl(estimator or "k3", scores.logp, rollouts.ref_logp, ratio)


def kl_penalty(kl: Tensor, weight: Tensor, beta: float) -> Tensor:
    """The term of the loss: beta times the weighted KL (N, M)."""
    weighted = torch.where(weight > 0, kl * weight, 0.0)
    return weighted.sum() * beta


def kl_as_reward(rollouts: "Rollouts", beta: float) -> Tensor:
    """-beta log(p / p_ref) of each sampled token (N, M); its mean is -beta times the KL (estimator k1)."""
    log_ratio = rollouts.old_logp - rollouts.ref_logp                                # (N, M)
    return -beta * log_ratio.masked_fill(rollouts.mask == 0, 0.0)
