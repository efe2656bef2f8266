"""Held-out evaluation of a causal generator, and the means over all completions of any evaluation."""

from dataclasses import replace
from math import comb

import numpy as np
import torch

from grpo.evaluation.samples import SHOWN, best_and_worst
from grpo.kl import choose_estimator, kl_per_token
from grpo.rollout import join
from grpo.scoring import score, with_reference

NOISE_SEED = 99  # seed of the sampling noise of every evaluation, whatever the seed of the run


def sum_and_count(x):
    """(sum, count) of the values that are not NaN."""
    return x.nansum(), (~x.isnan()).sum()


def masked_sum(x, mask):
    """(sum, count) of x where the mask is 1.0; x, mask: of the same shape."""
    return (x * mask).sum(), mask.sum()


def reward_sums(values):
    """{metric: (sum, count)} of rewards {name: (N,)}, over the completions that each scored; it is NaN for others."""
    return {f"reward/{name}": sum_and_count(x) for name, x in values.items()}


def means_of(sums, logged):
    """{metric: mean} of what was counted in each batch, {metric: (sum, count)}, and of what rewards logged likewise.
    Raises ValueError if a reward logs under the name of a held-out metric."""
    sums, logged = join(sums), join(logged)
    for name in logged:
        if name in sums:
            raise ValueError(f"log_metric({name!r}, ...): the held-out metrics have one of this name; give it another")
    return {name: float(total / count) for name, (total, count) in (sums | logged).items() if count}


def pass_at_k(right, n, k):
    """Probability that at least one of k completions is correct, if k of n are drawn and `right` of the n are correct
    (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def pass_at_k_sum(right, k):
    """(sum, count) of pass@k over the prompts with at least k scored completions. right: (P, G) NaN where not scored"""
    scored = [row[~row.isnan()] for row in right]
    chances = [pass_at_k(int(row.sum()), len(row), k) for row in scored if len(row) >= k]
    return sum(chances), len(chances)


class PromptEvaluation:
    """Fixed validation prompts and fixed noise, so that two policies are compared on the same draws.

    evaluation(policy, temperature) returns ({metric: number}, samples to show); docs/metrics.md has the metrics.
    A completion is correct if the success reward is at its maximum. One that the success reward skips, or that is late,
    counts neither as correct nor as wrong. Without a success reward accuracies and pass@k are left out.
    """

    # columns of the console line
    columns = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "completion_length", "truncated")

    def __init__(self, data, reference, rewards, config):
        """data: a PromptConsumer; config: the run's. Its first eval_problems validation prompts are completed
        eval_completions times each."""
        if config.pass_k > config.eval_completions:
            raise ValueError(f"pass_k={config.pass_k} must be at most eval_completions={config.eval_completions}")
        self.data, self.reference = data, reference
        self.rewards = rewards
        self.config = config.for_evaluation(NOISE_SEED)
        self.records = data.records["val"][: config.eval_problems]
        # Prompts at a time: as many completions as in training, and at least those of one prompt
        self.at_once = max(1, config.batch_size * config.group_size // config.eval_completions)

    @torch.no_grad()
    def __call__(self, policy, temperature):
        config = replace(self.config, temperature=temperature)
        sums, logged = [], []
        shown = []
        for start in range(0, len(self.records), self.at_once):
            records = self.records[start : start + self.at_once]
            numbers = np.arange(start, start + len(records))
            batch = self.data.pack(records, numbers)
            rollouts = policy.sample(batch, 0, config)
            values, log = self.rewards.score(rollouts.texts, config.group_size)
            found = self._accuracy_sums(policy, batch, values)
            found |= reward_sums(values) | self._token_sums(policy, rollouts, config)
            sums.append({name: (float(total), float(count)) for name, (total, count) in found.items()})
            logged.append(log.metrics)
            if len(shown) < SHOWN:
                total = self.rewards.total(values) if values else torch.zeros(len(rollouts.mask))
                samples = best_and_worst(policy, rollouts, total, self.rewards, values, log)
                shown += [record for record, _ in samples]
        return means_of(sums, logged), shown[:SHOWN]

    def _accuracy_sums(self, policy, batch, values):
        """{metric: (sum, count)} of the success reward, of the sampled completions and of a greedy one each."""
        if not self.rewards.success:
            return {}
        right = self.rewards.right(values)                                           # (N,) NaN where not scored
        right = right.view(-1, self.config.group_size)                               # (P, G)
        greedy, _ = self.rewards.score(policy.greedy(batch, self.config), 1, [self.rewards.success])
        return {
            "greedy_accuracy": sum_and_count(self.rewards.right(greedy)),
            "sampled_accuracy": sum_and_count(right),
            "pass_at_k": pass_at_k_sum(right, self.config.pass_k)}

    def _token_sums(self, policy, rollouts, config):
        """{metric: (sum, count)} of length, truncation, entropy and KL."""
        estimator = choose_estimator(config, policy)
        rollouts = with_reference(rollouts, self.reference, estimator, config)
        scores = score(policy, rollouts, config.temperature)
        sums = rollouts.texts.metrics | {"entropy": masked_sum(scores.entropy, rollouts.mask)}
        kl = kl_per_token(scores, rollouts, estimator)
        if kl is not None:
            sums["kl"] = masked_sum(kl, rollouts.mask)
        return sums
