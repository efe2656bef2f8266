"""The metrics of a step (docs/metrics.md): what rollouts, rewards and samplers add to its Sums."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from core.errors import Mistake
from grpo.losses import centred
from grpo.rollout import Rollouts, Scored, differing
from grpo.sums import Sums, Values

CLAMP = 20.0    # largest log ratio that is measured, so that sums of ratios stay finite
MOST_KL = 0.2   # nats per token: above this a sampler in other processes runs other weights than the policy


def equal_completions(target: Tensor, mask: Tensor) -> Tensor:
    """(P, G, G) bool: completions of a group that have the same tokens. target, mask: (P, G, M)"""
    tokens = (target + 1) * mask.long()                                              # (P, G, M) 0 on padding only
    return (tokens[:, :, None] == tokens[:, None]).all(-1)


def unique_completions(target: Tensor, mask: Tensor) -> Tensor:
    """Number of distinct completions of each group. target, mask: (P, G, M). Returns (P,)."""
    same = equal_completions(target, mask)                                           # (P, G, G)
    equals_earlier = same.tril(-1).any(-1)                                           # (P, G)
    return (~equals_earlier).sum(1)


def add_discriminative(sums: Sums, score: Tensor, reward: Tensor) -> None:
    """Adds how well log-probabilities separate better from worse completions of a group (arXiv 2505.12366).

    score: (P, G) mean log-probability of the tokens of each completion; reward: (P, G), NaN where not scored
    Over pairs of a group with different rewards: the share in which the better one has the higher score (a tie counts
    half), and its mean lead; and the share of completions above the mean reward of their group
    """
    better = reward[:, :, None] > reward[:, None]                                    # (P, G, G) False with a NaN
    pairs = better.sum()
    lead = score[:, :, None] - score[:, None]                                        # (P, G, G)
    won = (lead > 0).float() + 0.5 * (lead == 0)                                     # (P, G, G)
    sums.mean("discriminative_score", (won * better).sum(), pairs)
    sums.mean("discriminative_margin", (lead * better).sum(), pairs)

    above_mean = reward > reward.nanmean(1, keepdim=True)                            # (P, G)
    differs = better.flatten(1).any(1, keepdim=True)                                 # (P, 1) else only rounding
    is_scored = ~reward.isnan()                                                      # (P, G)
    sums.mean("success_prob", (above_mean & differs).sum(), is_scored.sum())


def reward_statistics(reward: Tensor) -> dict:
    """{metric: (sum, count)} of the rewards (P, G) that a group compares, NaN where not scored: their mean over the
    completions, and the mean over the groups of their standard deviation in the group."""
    is_scored = ~reward.isnan()                                                      # (P, G)
    away, count = centred(reward.nan_to_num()[..., None], is_scored[..., None])      # (P, G, 1), (P, 1, 1)
    squares = away.square().sum(1)                                                   # (P, 1)
    variance = squares / (count[:, 0] - 1).clamp(min=1)                              # (P, 1)
    groups = is_scored.any(1).sum()
    return {
        "mean_reward": (reward.nansum(), is_scored.sum()),
        "std_reward": (variance.sqrt().sum(), groups)}


def add_varied(sums: Sums, scored: Scored) -> None:
    """Counts the groups in which the values of each reward differ. Completions without a reward do not count."""
    left_out = scored.reward.isnan()                                                 # (P, G)
    for name, values in scored.values.items():
        seen = torch.where(left_out, torch.nan, values.view_as(left_out))            # (P, G)
        sums.varied(name, differing(seen).sum())


def add_rollouts(sums: Sums, rollouts: Rollouts, scored: Scored, discriminative: bool = False) -> None:
    """Adds the metrics of rollouts that training does not change."""
    reward = scored.reward                                                           # (P, G)
    mask = rollouts.mask                                                             # (N, M)
    problems = rollouts.problems
    for name, (total, count) in reward_statistics(reward).items():
        sums.mean(name, total, count)
    sums.mean("frac_reward_zero_std", (~scored.differ()).sum(), problems)
    sums.sum("skipped_samples", reward.isnan().sum())
    for name, values in scored.values.items():
        skipped = values.isnan()                                                     # (N,)
        sums.mean(f"reward/{name}", values.nansum(), (~skipped).sum())
        sums.skipped(name, skipped.sum())
    for name, (total, count) in scored.metrics.items():
        sums.logged(name, total, count)

    unique = unique_completions(rollouts.by_problem(rollouts.target), rollouts.by_problem(mask))
    sums.mean("unique_completions", unique.sum(), problems)
    lengths = map(len, rollouts.texts.completion_ids)
    sums.sum("text_tokens", sum(lengths))
    for name, (total, count) in rollouts.texts.metrics.items():
        sums.sampled(name, total, count)

    logp = rollouts.old_logp * mask                                                  # (N, M)
    sums.mean("mean_log_prob", logp.sum(), mask.sum())
    if discriminative:
        score = logp.sum(1) / mask.sum(1).clamp(min=1)                               # (N,)
        add_discriminative(sums, score.view_as(reward), reward)


def add_mismatch(sums: Sums, logp: Tensor, rollouts: Rollouts) -> None:
    """Adds how far the policy, before its first step on the rollouts, is from the sampler that drew their tokens: sums
    over the tokens of the loss of d = log(p / q), clamped. exp(d) - d - 1 estimates the KL from sampler to policy (k3).

    logp: (N, M) log p, under the policy; rollouts.old_logp: log q, under the sampler
    """
    counted = rollouts.train_mask > 0                                                # (N, M)
    tokens = counted.sum()
    d = (logp.detach() - rollouts.old_logp).masked_fill(~counted, 0.0)               # (N, M)
    d = d.clamp(-CLAMP, CLAMP)
    ratio = d.exp() * counted                                                        # (N, M)
    ratio_minus_one = d.expm1()                                                      # (N, M) exact where d is small
    sums.mean("ratio_minus_one", ratio_minus_one.abs().sum(), tokens)
    sums.mean("mismatch_kl", (ratio_minus_one - d).sum(), tokens)
    sums.internal("tokens of the mismatch", tokens)
    sums.internal("ratio", ratio.sum())
    sums.internal("ratio_square", ratio.square().sum())
    if d.numel():
        sums.highest("mismatch_max", d.abs().max())


def add_sample_size(values: Values) -> None:
    """Adds Kish's effective sample size of the ratios of add_mismatch, as a share of their tokens."""
    internal = values.internal
    tokens = internal.get("tokens of the mismatch", 0.0)
    if tokens > 0:
        of_equal_ratios = tokens * internal["ratio_square"]
        values.add_metric("effective_sample_size", internal["ratio"] ** 2 / of_equal_ratios)
    else:
        values.metrics.pop("mismatch_max", None)


def check_mismatch(metrics: dict, sampler: str) -> None:
    """Raises Mistake if rollouts of another process are further from the policy than rounding or a few steps of
    training explain."""
    kl = metrics.get("mismatch_kl", 0.0)
    if kl > MOST_KL:
        raise Mistake(f"sampler={sampler!r}: mismatch_kl={kl:.3g} nats per token is above {MOST_KL:g}: check the "
                      "sampler's model and ids, or lower max_staleness or learning_rate")


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
        self.began = time.perf_counter()
        self.show(phase)

    def end(self) -> None:
        """Ends the current phase, if there is one."""
        if self.phase is not None:
            before = self.times.get(self.phase, 0.0)
            self.times[self.phase] = before + time.perf_counter() - self.began
        self.phase = None
