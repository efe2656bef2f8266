"""The metrics of a step (docs/metrics.md): what rollouts, rewards and samplers add to its Sums."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from core.errors import Mistake
from grpo.losses import centred
from grpo.rollout import Rollouts, Scored, differing
from grpo.sums import Sums

CLAMP = 20.0    # largest log ratio that is measured, so that sums of ratios stay finite
MOST_KL = 0.2   # nats per token: a sampler of other processes that is further away is not the policy's


def equal_completions(target: Tensor, mask: Tensor) -> Tensor:
    """(P, G, G) bool: completions of a group that have the same tokens. target, mask: (P, G, M)"""
    x = (target + 1) * mask.long()                                                   # (P, G, M) 0 on padding only
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
    differs = better.flatten(1).any(1, keepdim=True)                                 # (P, 1) else only rounding
    above = (reward > mean) & differs
    return {"discriminative_score": ((ranked * better).sum(), better.sum()),
            "discriminative_margin": ((lead * better).sum(), better.sum()),
            "success_prob": (above.sum(), (~reward.isnan()).sum())}


def group_stds(reward: Tensor) -> Tensor:
    """(P,) the standard deviation of the rewards (P, G) of each group, NaN where not scored."""
    seen = ~reward.isnan()                                                           # (P, G)
    away, count = centred(reward.nan_to_num()[..., None], seen[..., None])           # (P, G, 1), (P, 1, 1)
    variance = away.square().sum(1) / (count[:, 0] - 1).clamp(min=1)                 # (P, 1)
    return variance.sqrt().squeeze(1)


def reward_statistics(reward: Tensor) -> dict:
    """{metric: (sum, count)} of the rewards (P, G) that a group compares, NaN where not scored: their mean over the
    completions, and the mean over the groups of their standard deviation there."""
    seen = ~reward.isnan()
    return {"mean_reward": (reward.nansum(), seen.sum()),
            "std_reward": (group_stds(reward).sum(), seen.any(1).sum())}


def add_varied(sums: Sums, scored: Scored) -> None:
    """Counts the groups in which the values of each reward differ, of the completions that are scored."""
    left_out = scored.reward.isnan()                                                 # (P, G)
    for name, x in scored.values.items():
        values = torch.where(left_out, torch.nan, x.view_as(left_out))               # (P, G)
        sums.varied(name, differing(values).sum())


def add_rollouts(sums: Sums, rollouts: Rollouts, scored: Scored, discriminative: bool = False) -> None:
    """Adds what is known of rollouts before training on them."""
    reward, mask = scored.reward, rollouts.mask                                      # (P, G), (N, M)
    seen, problems = ~reward.isnan(), len(reward)
    unique = unique_completions(rollouts.by_problem(rollouts.target), rollouts.by_problem(mask))
    for name, pair in reward_statistics(reward).items():
        sums.mean(name, *pair)
    sums.mean("mean_log_prob", (rollouts.old_logp * mask).sum(), mask.sum())
    sums.mean("frac_reward_zero_std", (~scored.differ()).sum(), problems)
    sums.mean("unique_completions", unique.sum(), problems)
    sums.sum("skipped_samples", (~seen).sum())
    sums.sum("text_tokens", sum(map(len, rollouts.texts.completion_ids)))
    for name, x in scored.values.items():
        sums.mean(f"reward/{name}", x.nansum(), (~x.isnan()).sum())
        sums.skipped(name, x.isnan().sum())
    for name, pair in scored.metrics.items():
        sums.logged(name, *pair)
    for name, pair in rollouts.texts.metrics.items():
        sums.sampled(name, *pair)
    if discriminative:
        logp = (rollouts.old_logp * mask).sum(1)                                     # (N,) of a whole completion
        score = logp / mask.sum(1).clamp(min=1)                                      # (N,)
        for name, pair in discriminative_sums(score.view_as(reward), reward).items():
            sums.mean(name, *pair)


def add_mismatch(sums: Sums, logp: Tensor, rollouts: Rollouts) -> None:
    """Adds the sums over the tokens of the loss of d = log(p / q), clamped: p under the policy before its first step on
    them, q under the sampler. exp(d) - d - 1 estimates the KL from sampler to policy (k3).

    logp: (N, M) log p; rollouts.old_logp: log q
    """
    counted = rollouts.train_mask > 0                                                # (N, M)
    tokens = counted.sum()
    d = (logp.detach() - rollouts.old_logp).masked_fill(~counted, 0.0)               # (N, M)
    d = d.clamp(-CLAMP, CLAMP)
    away = d.expm1()                                                                 # (N, M) exact where d is small
    ratio = torch.where(counted, d.exp(), 0.0)                                       # (N, M)
    sums.mean("ratio_minus_one", away.abs().sum(), tokens)
    sums.mean("mismatch_kl", (away - d).sum(), tokens)
    sums.internal("tokens of the mismatch", tokens)
    sums.internal("ratio", ratio.sum())
    sums.internal("ratio_square", ratio.square().sum())
    if d.numel():
        sums.highest("mismatch_max", d.abs().max())


def check_mismatch(metrics: dict, sampler: str) -> None:
    """Raises Mistake if rollouts of another process are further from the policy than rounding or a few steps of
    training explain."""
    if metrics.get("mismatch_kl", 0.0) > MOST_KL:
        raise Mistake(f"sampler={sampler!r}: mismatch_kl={metrics['mismatch_kl']:.3g} nats per token is above "
                      f"{MOST_KL:g}: check the sampler's model and ids, or lower max_staleness or learning_rate")


class Timer:
    """The clock of a step. A phase lasts until the next one begins, or until `end`."""

    def __init__(self, show: Callable = lambda phase: None):
        """show: is told the name of each phase as it begins"""
        self.times = {}  # {"time/<phase>": seconds}
        self.show = show
        self.phase = None
        self.began = 0.0

    def begin(self, phase: str) -> None:
        self.end()
        self.phase = f"time/{phase}"
        self.show(phase)

    def end(self) -> None:
        """Ends the phase that lasts, if there is one."""
        now = time.perf_counter()
        if self.phase is not None:
            self.times[self.phase] = self.times.get(self.phase, 0.0) + now - self.began
        self.phase = None
        self.began = now
