"""The metrics of a step (docs/metrics.md) that rollouts, rewards and samplers add to its Sums."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from core.errors import Mistake
from grpo.losses import centred
from grpo.rollout import Rollouts, Scored, differing
from grpo.sums import Sums, Values

CLAMP = 20.0    # largest log ratio that is measured, so that sums of ratios stay finite
MOST_KL = 0.2   # nats per token: a sampler further away is not running the policy's weights


def equal_completions(target: Tensor, mask: Tensor) -> Tensor:
    """(P, G, G) bool: True where two completions of a group have the same tokens. target, mask: (P, G, M)"""
    tokens = (target + 1) * mask.long()                                              # (P, G, M) 0 only on padding
    return (tokens[:, :, None] == tokens[:, None]).all(-1)


def unique_completions(target: Tensor, mask: Tensor) -> Tensor:
    """Number of distinct completions of each group. target, mask: (P, G, M). Returns (P,)."""
    same = equal_completions(target, mask)                                           # (P, G, G)
    equals_earlier = same.tril(-1).any(-1)                                           # (P, G)
    return (~equals_earlier).sum(1)


def add_discriminative(sums: Sums, score: Tensor, reward: Tensor) -> None:
    """Adds metrics of how well log-probabilities separate better from worse completions of a group (arXiv 2505.12366):

    discriminative_score: share of the pairs with different rewards whose better completion has the higher score
        (a tie counts half)
    discriminative_margin: mean difference of the two scores, over the same pairs
    success_prob: share of the completions whose reward is above the mean of their group
    score: (P, G) mean log-probability of the tokens of each completion; reward: (P, G), NaN where not scored
    """
    better = reward[:, :, None] > reward[:, None]                                    # (P, G, G) False with a NaN
    pairs = better.sum()
    lead = score[:, :, None] - score[:, None]                                        # (P, G, G)
    won = (lead > 0).float() + 0.5 * (lead == 0)                                     # (P, G, G)
    sums.mean("discriminative_score", (won * better).sum(), pairs)
    sums.mean("discriminative_margin", (lead * better).sum(), pairs)

    above_mean = reward > reward.nanmean(1, keepdim=True)                            # (P, G)
    # In a group of equal rewards only rounding puts some above their mean
    differs = better.flatten(1).any(1, keepdim=True)                                 # (P, 1)
    succeeded = above_mean & differs                                                 # (P, G)
    is_scored = ~reward.isnan()                                                      # (P, G)
    sums.mean("success_prob", succeeded.sum(), is_scored.sum())


def reward_statistics(reward: Tensor) -> dict:
    """{metric: (sum, count)} of the rewards (P, G), NaN where not scored: the mean over completions, and the mean over
    groups of the standard deviation within the group."""
    is_scored = ~reward.isnan()                                                      # (P, G)
    # `centred` has a third axis for the tokens of a completion
    known = reward.nan_to_num()[..., None]                                           # (P, G, 1)
    deviation, count = centred(known, is_scored[..., None])                          # (P, G, 1), (P, 1, 1)
    squares = deviation.square().sum(1)                                              # (P, 1)
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
    """Adds the metrics that are known before training."""
    reward = scored.reward                                                           # (P, G)
    mask = rollouts.mask                                                             # (N, M)
    problems = rollouts.problems
    for name, (total, count) in reward_statistics(reward).items():
        sums.mean(name, total, count)
    equal = ~scored.differ()                                                         # (P,)
    sums.mean("frac_reward_zero_std", equal.sum(), problems)
    sums.sum("skipped_samples", reward.isnan().sum())
    for name, values in scored.values.items():
        skipped = values.isnan()                                                     # (N,)
        sums.mean(f"reward/{name}", values.nansum(), (~skipped).sum())
        sums.skipped(name, skipped.sum())
    for name, (total, count) in scored.metrics.items():
        sums.logged(name, total, count)

    target = rollouts.by_problem(rollouts.target)                                    # (P, G, M)
    unique = unique_completions(target, rollouts.by_problem(mask))                   # (P,)
    sums.mean("unique_completions", unique.sum(), problems)
    lengths = map(len, rollouts.texts.completion_ids)
    sums.sum("text_tokens", sum(lengths))
    for name, (total, count) in rollouts.texts.metrics.items():
        sums.sampled(name, total, count)

    logp = rollouts.old_logp * mask                                                  # (N, M)
    sums.mean("mean_log_prob", logp.sum(), mask.sum())
    if discriminative:
        tokens = mask.sum(1).clamp(min=1)                                            # (N,)
        score = logp.sum(1) / tokens
        add_discriminative(sums, score.view_as(reward), reward)


def add_mismatch(sums: Sums, logp: Tensor, rollouts: Rollouts) -> None:
    """Adds metrics of the distance between the sampler and the policy before its first step on the rollouts.

    d = log(p / q) of each token in the loss, clamped to +-CLAMP; p is its probability under the policy, q under the
    sampler. exp(d) - d - 1 estimates the KL from the sampler to the policy (k3).
    logp: (N, M) log p; rollouts.old_logp: log q
    """
    counted = rollouts.train_mask > 0                                                # (N, M)
    tokens = counted.sum()
    d = logp.detach() - rollouts.old_logp                                            # (N, M)
    d = d.masked_fill(~counted, 0.0).clamp(-CLAMP, CLAMP)
    ratio = d.exp() * counted                                                        # (N, M)
    ratio_minus_one = d.expm1()                                                      # (N, M) exact where d is small
    sums.mean("ratio_minus_one", ratio_minus_one.abs().sum(), tokens)
    sums.mean("mismatch_kl", (ratio_minus_one - d).sum(), tokens)
    sums.internal("tokens of the mismatch", tokens)
    sums.internal("ratio", ratio.sum())
    sums.internal("ratio_square", ratio.square().sum())
    if d.numel():
        sums.highest("mismatch_max", d.abs().max())


def add_effective_sample_size(values: Values) -> None:
    """Adds Kish's effective sample size of the ratios r of add_mismatch, as a share of the n tokens:
    (sum r)^2 / (n sum r^2)."""
    sums = values.internal
    tokens = sums.get("tokens of the mismatch", 0.0)
    if tokens > 0:
        size = sums["ratio"] ** 2 / (tokens * sums["ratio_square"])
        values.add_metric("effective_sample_size", size)
    else:
        values.metrics.pop("mismatch_max", None)  # no token was measured, and 0 would look like agreement


def check_mismatch(metrics: dict, sampler: str) -> None:
    """Raises Mistake if rollouts of another process are further from the policy than rounding or a few training steps
    can explain."""
    kl = metrics.get("mismatch_kl", 0.0)
    if kl > MOST_KL:
        raise Mistake(f"sampler={sampler!r}: mismatch_kl={kl:.3g} nats per token is above {MOST_KL:g}: check the "
                      "sampler's model and ids, or lower max_staleness or learning_rate")


class Timer:
    """The clock of a step. A phase lasts until the next one begins, or until `end`."""

    def __init__(self, show: Callable = lambda phase: None):
        """show: called with the name of each phase as it begins"""
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
