"""The metrics of a step, kept as sums that add up over micro-batches and ranks.

Until the end of a step each is a pair (sum, count); where count is None, the sum itself is the metric. Sums whose names
begin with _ are no metrics themselves.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from core.distributed import Distributed
from core.errors import Mistake
from core.optim import apply_gradients, total_over_ranks
from core.settings.setting import Settings
from grpo.rollout import Rollouts, Scored, differing

if TYPE_CHECKING:
    from grpo.policies.policy import Policy

LOGGED = "logged by a reward: "  # begins the name of what rewards logged, which may not be that of another metric
SKIPPED = "skipped/"             # begins the name of the number of completions that a reward skipped
VARIED = "varied in groups: "    # begins the name of the number of groups in which a reward differs; alone: their sum
OF_ROLLOUTS = ("mean_reward", "mean_log_prob", "mean_advantage")  # if one is not finite, no step on the rollouts can be
DECIDING = ("loss", *OF_ROLLOUTS)                                 # a step in which one is not finite is skipped
CLAMP = 20.0                 # largest log ratio that is measured, so that sums of ratios stay finite
MOST_KL = 0.2                # nats per token: a sampler of other processes that is further away is not the policy's
LARGEST = "_mismatch_max"    # of this sum the largest over micro-batches and ranks counts
NO_MISMATCH = {"ratio_minus_one": (0.0, 0), "mismatch_kl": (0.0, 0)}


def add_up(sums: dict, more: dict) -> None:
    """Adds the sums of another part of a step, in place."""
    for name, (total, count) in more.items():
        if name not in sums:
            sums[name] = total, count
            continue
        before, count_before = sums[name]
        total = torch.maximum(before, total) if name == LARGEST else before + total
        sums[name] = total, None if count is None else count_before + count


def taken(name: str) -> Mistake:
    """The error of a reward that logs a metric under a name that training or evaluation gives to another."""
    return Mistake(f"log_metric({name!r}, ...): there is another metric of this name; give it another")


def equal_completions(target: Tensor, mask: Tensor) -> Tensor:
    """(P, G, G) bool: completions of a group that have the same tokens. target, mask: (P, G, M)"""
    x = (target + 1) * mask.long()                                                   # (P, G, M) 0 is padding alone
    return (x[:, :, None] == x[:, None]).all(-1)


def unique_completions(target: Tensor, mask: Tensor) -> Tensor:
    """Number of distinct completions of each group. target, mask: (P, G, M). Returns (P,)."""
    same = equal_completions(target, mask)                                           # (P, G, G)
    repeated = same.tril(-1).any(-1)                                                 # (P, G) an earlier one is equal
    return (~repeated).sum(1)


def discriminative_sums(score: Tensor, reward: Tensor) -> dict:
    """Shows how well log-probabilities separate better from worse completions of a group (arXiv 2505.12366).

    score: (P, G) mean log-probability of the tokens of each completion; reward: (P, G), NaN where not scored
    Over pairs of a group with different rewards: the share in which the better one has the higher score (a tie counts
    half), and its mean lead; and the share of completions above the mean reward of their group
    """
    better = reward[:, :, None] > reward[:, None]                                    # (P, G, G) False with a NaN
    lead = score[:, :, None] - score[:, None]                                        # (P, G, G)
    ranked = (lead > 0).float() + 0.5 * (lead == 0)                                  # (P, G, G)
    mean = reward.nanmean(1, keepdim=True)
    differs = better.flatten(1).any(1, keepdim=True)                                 # (P, 1) equal ones only round
    above = (reward > mean) & differs
    return {"discriminative_score": ((ranked * better).sum(), better.sum()),
            "discriminative_margin": ((lead * better).sum(), better.sum()),
            "success_prob": (above.sum(), (~reward.isnan()).sum())}


def group_stds(reward: Tensor) -> Tensor:
    """(P,) the standard deviation of the rewards (P, G) of each group, NaN where not scored."""
    count = (~reward.isnan()).sum(1).clamp(min=1)                                    # (P,)
    mean = reward.nansum(1) / count                                                  # (P,)
    away = reward - mean[:, None]                                                    # (P, G)
    variance = away.square().nansum(1) / (count - 1).clamp(min=1)                    # (P,)
    return variance.sqrt()


def reward_statistics(reward: Tensor) -> dict:
    """{metric: (sum, count)} of the rewards (P, G) that a group compares, NaN where not scored: their mean over the
    completions, and the mean over the groups of their standard deviation there."""
    seen = ~reward.isnan()
    return {"mean_reward": (reward.nansum(), seen.sum()),
            "std_reward": (group_stds(reward).sum(), seen.any(1).sum())}


def varied_sums(scored: Scored) -> dict:
    """The number of groups in which the values of each reward differ, of the completions that are scored."""
    left_out = scored.reward.isnan()                                                 # (P, G)
    sums = {}
    for name, x in scored.values.items():
        values = torch.where(left_out, torch.nan, x.view_as(left_out))               # (P, G)
        sums[f"{VARIED}{name}"] = differing(values).sum(), None
    return sums


def rollout_sums(rollouts: Rollouts, scored: Scored, differ: Tensor, discriminative: bool = False) -> dict:
    """The metrics of rollouts before training on them. differ: (P,) bool, whether the rewards of a group differ"""
    reward, mask = scored.reward, rollouts.mask                                      # (P, G), (N, M)
    seen, problems = ~reward.isnan(), float(len(reward))
    unique = unique_completions(rollouts.by_problem(rollouts.target), rollouts.by_problem(mask))
    sums = {
        **reward_statistics(reward),
        "mean_log_prob": ((rollouts.old_logp * mask).sum(), mask.sum()),
        "frac_reward_zero_std": ((~differ).sum(), problems),
        "unique_completions": (unique.sum(), problems),
        "skipped_samples": ((~seen).sum(), None),
        "text_tokens": (float(sum(map(len, rollouts.texts.completion_ids))), None),
    }
    for name, x in scored.values.items():
        sums[f"reward/{name}"] = x.nansum(), (~x.isnan()).sum()
        sums[f"{SKIPPED}{name}"] = x.isnan().sum(), None
    if discriminative:
        logp = (rollouts.old_logp * mask).sum(1)                                     # (N,) of a whole completion
        score = logp / mask.sum(1).clamp(min=1)                                      # (N,)
        sums |= discriminative_sums(score.view_as(reward), reward)
    return sums | rollouts.texts.metrics


def logged_sums(scored: Scored, dist: Distributed) -> dict:
    """The sums that rewards logged. The functions of a rank may log other metrics than those of the next."""
    return {LOGGED + name: scored.metrics.get(name, (0.0, 0)) for name in dist.names_of_all(scored.metrics)}


def mismatch(logp: Tensor, rollouts: Rollouts) -> dict:
    """The sums over the tokens of the loss of d = log(p / q), clamped: p under the policy before its first step on
    them, q under the sampler. exp(d) - d - 1 estimates the KL from sampler to policy (k3).

    logp: (N, M) log p; rollouts.old_logp: log q
    """
    counted = rollouts.train_mask > 0                                                # (N, M)
    tokens = counted.sum()
    d = (logp.detach() - rollouts.old_logp).masked_fill(~counted, 0.0)               # (N, M)
    d = d.clamp(-CLAMP, CLAMP)
    away = d.expm1()                                                                 # (N, M) exact where d is small
    ratio = torch.where(counted, d.exp(), 0.0)                                       # (N, M)
    return {
        "ratio_minus_one": (away.abs().sum(), tokens),
        "mismatch_kl": ((away - d).sum(), tokens),
        "_ratio": (ratio.sum(), None),
        "_ratio_square": (ratio.square().sum(), None),
        LARGEST: (F.pad(d.abs().flatten(), (0, 1)).max(), None)}  # 0 of no tokens


def check_mismatch(metrics: dict, config: Settings) -> None:
    """Raises Mistake if rollouts of another process are further from the policy than rounding or a few steps of
    training explain."""
    elsewhere = config.sampler != "local" and config.fill_estimator == "trajectory"
    if elsewhere and metrics.get("mismatch_kl", 0.0) > MOST_KL:
        raise Mistake(f"sampler={config.sampler!r}: mismatch_kl={metrics['mismatch_kl']:.3g} nats per token is "
                      f"above {MOST_KL:g}: check the sampler's model and ids, or lower max_staleness or "
                      "learning_rate")


def end_step(policy: "Policy", optimizers: list, sums: dict, config: Settings, dist: Distributed) -> dict:
    """Adds the sums of all ranks up, and steps or skips. Returns the metrics of docs/metrics.md; a mean of nothing is
    left out. bad_rollouts: 1 if every other step on the rollouts would be skipped too; taught: 1 if the rewards gave
    an advantage to any token of the rollouts."""
    numbers = {name: total for name, (total, _) in sums.items()}
    numbers |= {f"count of {name}": count for name, (_, count) in sums.items() if count is not None}
    totals = total_over_ranks(numbers, dist, [LARGEST])
    dist.sum_gradients(policy.parameters())
    totals = apply_gradients(policy.parameters(), optimizers, config.grad_clip, totals, "_loss_tokens", DECIDING)
    counts = {name: totals.get(f"count of {name}", 1) for name in sums}
    means = {name: totals[name] / count for name, count in counts.items() if count}
    metrics = {name: totals[name] for name in ("grad_norm", "skipped_steps", "empty_steps")}
    if tokens := counts["mismatch_kl"]:
        metrics["mismatch_max"] = totals[LARGEST]
        # Kish's effective sample size, as a share of the tokens
        metrics["effective_sample_size"] = totals["_ratio"] ** 2 / (tokens * totals["_ratio_square"])
    for name, x in means.items():
        key = name.removeprefix(LOGGED)
        if key in metrics:
            raise taken(key)
        if not name.startswith("_"):
            metrics[key] = x
    check_mismatch(metrics, config)
    bad = not all(math.isfinite(totals[name]) for name in OF_ROLLOUTS)
    return metrics | {"bad_rollouts": int(bad), "taught": int(totals.get("_taught", 0.0) != 0)}
