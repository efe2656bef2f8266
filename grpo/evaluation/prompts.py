"""Held-out evaluation of a causal generator: accuracy, rewards and length of its completions."""

from dataclasses import replace
from math import comb
from types import SimpleNamespace

import numpy as np
import torch

from core.prompts import as_columns
from grpo.evaluation.means import add_up, means_of, reward_sums, sum_and_count
from grpo.evaluation.samples import SHOWN, best_and_worst
from grpo.kl import choose_estimator, kl_per_token
from grpo.scoring import score, with_reference

NOISE_SEED = 99  # seed of the sampling noise of every evaluation, whatever the seed of the run


def pass_at_k(right, n, k):
    """Probability that at least one of k completions is correct, if k of n are drawn and `right` of the n are correct
    (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - right, k) / comb(n, k)


class PromptEvaluation:
    """Fixed validation prompts and fixed noise, so that two policies are compared on the same draws.

    evaluation(policy, temperature) returns ({metric: number}, samples to show):
      greedy_accuracy     share of prompts whose greedy completion is correct
      sampled_accuracy    share of correct completions among those sampled as in training
      pass_at_k           probability that at least one of k sampled completions is correct, k = config.pass_k
      reward/<name>       mean over the sampled completions; and under their own names, the metrics that rewards log
      completion_length   number of tokens, the stop token included
      truncated           share of completions that reached max_new_tokens without an end
      kl, entropy         per token of the sampled completions; KL to the reference by the run's estimator

    A completion is correct if the success reward is at its maximum. One that the success reward skips, or that is late,
    counts neither as correct nor as wrong. Without a success reward the first three are left out.
    """

    columns = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "completion_length", "truncated", "grad_norm",
               "lr", "tokens_per_second")  # columns of the console line

    def __init__(self, data, reference, rewards, config):
        """data: a PromptConsumer; config: the run's. Its first eval_problems validation prompts are completed
        eval_completions times each."""
        if config.pass_k > config.eval_completions:
            raise ValueError(f"pass_k={config.pass_k} must be at most eval_completions={config.eval_completions}")
        self.data, self.reference = data, reference
        self.rewards = rewards
        self.config = replace(config, group_size=config.eval_completions, seed=NOISE_SEED, train_pass_k=1)
        self.records = data.records["val"][: config.eval_problems]
        # Prompts at a time: as many completions as in training, and at least those of one prompt
        self.at_once = max(1, config.batch_size * config.group_size // config.eval_completions)

    @torch.no_grad()
    def __call__(self, policy, temperature):
        config = replace(self.config, temperature=temperature)
        sums, logged = {}, {}
        shown = []
        for start in range(0, len(self.records), self.at_once):
            records = self.records[start : start + self.at_once]
            batch = self.data.pack(records, np.arange(start, start + len(records)))
            rollouts = policy.sample(batch, 0, config)
            values, log = self.rewards.score(rollouts.texts, config.group_size)
            found = {}
            if self.rewards.success:
                right = self.rewards.right(values).view(-1, config.group_size)       # (P, G) NaN where not scored
                found["greedy_accuracy"] = sum_and_count(self._greedy(policy, batch, records))
                found["sampled_accuracy"] = sum_and_count(right)
                found["pass_at_k"] = pass_at_k_sum(right, config.pass_k)
            found |= reward_sums(values) | self._token_sums(policy, rollouts, config)
            add_up(sums, {name: (float(total), float(count)) for name, (total, count) in found.items()})
            add_up(logged, log.metrics)
            if len(shown) < SHOWN:
                shown += self._samples(rollouts.texts, values, log)
        return means_of(sums, logged), shown[:SHOWN]

    def _token_sums(self, policy, rollouts, config):
        """Sums and counts of length, truncation, entropy and KL."""
        estimator = choose_estimator(config, policy)
        rollouts = with_reference(rollouts, self.reference, estimator, config)
        scores, mask = score(policy, rollouts, config.temperature), rollouts.mask
        sums = rollouts.texts.metrics | {"entropy": ((scores.entropy * mask).sum(), mask.sum())}
        kl = kl_per_token(scores, rollouts, estimator)
        if kl is not None:
            sums["kl"] = ((kl * mask).sum(), mask.sum())
        return sums

    def _samples(self, texts, values, log):
        """Records of the first problems with their best and worst completions."""
        G = self.config.group_size
        total = self.rewards.total(values).nan_to_num(0.0).view(-1, G)               # (P, G)
        answers = texts.columns.get("answer", [None] * len(texts.prompts))
        records = []
        for i, (numbers, facts) in enumerate(best_and_worst(total, self.rewards, values, log)):
            record = {"problem": texts.prompts[i * G], "answer": answers[i * G]}
            for name, n in numbers.items():
                record[name] = texts.completions[n]
            records.append(record | facts)
        return records

    def _greedy(self, policy, batch, records):
        """(P,) 1.0 where the greedy completion of a prompt is correct, 0.0 where it is wrong, NaN where not scored."""
        prompts, columns = as_columns(records)
        completions = policy.greedy(batch, self.config)
        texts = SimpleNamespace(prompts=prompts, completions=completions, columns=columns, tokens=None)
        values, _ = self.rewards.score(texts, 1, [self.rewards.success])
        return self.rewards.right(values)


def pass_at_k_sum(right, k):
    """(sum, count) of pass@k over the prompts with at least k scored completions. right: (P, G) NaN where not scored"""
    chances = []
    for row in right.tolist():
        scored = [x for x in row if x == x]
        if len(scored) >= k:
            chances.append(pass_at_k(int(sum(scored)), len(scored), k))
    return sum(chances), len(chances)
