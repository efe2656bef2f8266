"""Held-out evaluation of a causal generator: accuracy, rewards and length of its completions."""

from dataclasses import replace
from math import comb
from types import SimpleNamespace

import numpy as np
import torch

from core.prompts import as_columns
from grpo.evaluation.samples import SHOWN, extra_columns, log_sums, reward_sums, under_own_names, verdicts
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
        self.data, self.reference, self.rewards = data, reference, rewards
        self.config = replace(config, group_size=config.eval_completions, seed=NOISE_SEED, train_pass_k=1)
        self.records = data.records["val"][: config.eval_problems]
        # Prompts at a time: as many completions as in training, and at least those of one prompt
        self.at_once = max(1, config.batch_size * config.group_size // config.eval_completions)

    @torch.no_grad()
    def __call__(self, policy, temperature):
        sums, shown, config = {}, [], replace(self.config, temperature=temperature)
        for start in range(0, len(self.records), self.at_once):
            records = self.records[start : start + self.at_once]
            batch = self.data.pack(records, np.arange(start, start + len(records)))
            part, samples = self._sampled(policy, batch, config)
            if self.rewards.success:
                part |= accuracy_sums("greedy_accuracy", self._greedy(policy, batch, records))
            sums |= {name: sums.get(name, 0.0) + float(value) for name, value in part.items()}
            shown = (shown + samples)[:SHOWN]
        names = ["greedy_accuracy", "sampled_accuracy", "pass_at_k"]
        names += [name for name in sums if name not in names and f"count of {name}" in sums]
        metrics = {name: sums[name] / count for name in names if (count := sums.get(f"count of {name}"))}
        return under_own_names(metrics), shown

    def _sampled(self, policy, batch, config):
        """Returns (sums over the prompts of a batch, samples to show)."""
        P, G = len(batch["number"]), config.group_size
        estimator = choose_estimator(config, policy)
        rollouts = with_reference(policy.sample(batch, 0, config), self.reference, estimator, config)
        scores, mask = score(policy, rollouts, config.temperature), rollouts.mask
        values, _, log = self.rewards.score(rollouts.texts, G)
        sums = {}
        if self.rewards.success:
            right = self.rewards.right(values).view(P, G)                            # NaN where not scored
            sums = accuracy_sums("sampled_accuracy", right) | pass_at_k_sums(right, config.pass_k)
        sums |= reward_sums(values) | log_sums(log)
        means = rollouts.texts.metrics | {"entropy": ((scores.entropy * mask).sum(), mask.sum())}
        kl = kl_per_token(scores, rollouts, estimator)
        if kl is not None:
            means["kl"] = ((kl * mask).sum(), mask.sum())
        for name, (total, count) in means.items():
            sums |= {name: total, f"count of {name}": count}
        return sums, self._samples(rollouts.texts, values, log, P, G)

    def _samples(self, texts, values, log, P, G):
        total = self.rewards.total(values).nan_to_num(0.0).view(P, G)
        samples, answers = [], texts.columns.get("answer", [None] * P * G)
        for i in range(min(SHOWN, P)):
            best, worst = i * G + int(total[i].argmax()), i * G + int(total[i].argmin())
            sample = {"problem": texts.prompts[i * G], "answer": answers[i * G],
                      "best": texts.completions[best], "worst": texts.completions[worst],
                      "best_score": round(float(total.flatten()[best]), 4),
                      "worst_score": round(float(total.flatten()[worst]), 4)}
            samples.append(sample | verdicts(self.rewards, values, best, worst) | extra_columns(log, best, worst))
        return samples

    def _greedy(self, policy, batch, records):
        """(P,) 1.0 where the greedy completion of a prompt is correct, 0.0 where it is wrong, NaN where not scored."""
        written, success = policy.greedy(batch, self.config), self.rewards.success
        prompts, columns = as_columns(records)
        texts = SimpleNamespace(prompts=prompts, completions=written, columns=columns, tokens=None)
        return self.rewards.right(self.rewards.score(texts, 1, [success])[0])


def accuracy_sums(name, right):
    """Sum and count of an accuracy. right: 1.0, 0.0, or NaN where not scored, which does not count."""
    return {name: right.nansum(), f"count of {name}": (~right.isnan()).sum()}


def pass_at_k_sums(right, k):
    """Sum and count of pass@k over the prompts with at least k scored completions. right: (P, G) as in accuracy_sums"""
    scored, found = (~right.isnan()).sum(1).tolist(), right.nansum(1).int().tolist()
    chances = [pass_at_k(r, n, k) for r, n in zip(found, scored, strict=True) if n >= k]
    return {"pass_at_k": sum(chances), "count of pass_at_k": len(chances)}
