"""Held-out evaluation of a causal generator: is it right, how often, and at what length."""

from dataclasses import replace
from math import comb

import numpy as np
import torch

from core.prompts import as_columns
from grpo.evaluation.samples import SHOWN, reward_sums
from grpo.kl import choose_estimator, kl_per_token
from grpo.rollout import Texts
from grpo.scoring import score, with_reference

NOISE_SEED = 99  # of every evaluation, whatever the seed of the run


def pass_at_k(right, n, k):
    """The chance that k of n completions, of which `right` are right, hold a right one (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - right, k) / comb(n, k)


class PromptEvaluation:
    """Fixed validation prompts and fixed noise, so that two policies are compared on the same draws.

    evaluation(policy, temperature) returns a few samples to show and
      greedy_accuracy     share of prompts whose likeliest completion is right: success_reward gives it its most; this
                          and the next two are left out if no reward says what is right. A completion that the success
                          reward skips, or that is late, counts neither as right nor as wrong
      sampled_accuracy    share of right completions among those sampled as in training
      pass_at_k           chance that k sampled completions hold a right one, k = config.pass_k
      reward/<name>       mean over the sampled completions
      completion_length   tokens, the stop token included
      truncated           share of completions that ran out of room
      kl, entropy         per token of the sampled completions; KL to the reference by the run's estimator
    """

    columns = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "completion_length", "truncated", "grad_norm",
               "lr", "tokens_per_second")  # of the console line

    def __init__(self, data, reference, rewards, config):
        """data: a PromptConsumer; config: of the run, whose first eval_problems are completed eval_completions times"""
        if config.pass_k > config.eval_completions:
            raise ValueError(f"pass_k={config.pass_k} must be at most eval_completions={config.eval_completions}")
        self.data, self.reference, self.rewards = data, reference, rewards
        self.config = replace(config, group_size=config.eval_completions, seed=NOISE_SEED, train_pass_k=1)
        self.records = data.records["val"][: config.eval_problems]
        self.at_once = max(1, config.batch_size * config.group_size // config.eval_completions)  # rows as in training

    @torch.no_grad()
    def __call__(self, policy, temperature):
        sums, shown, config = {}, [], replace(self.config, temperature=temperature)
        for start in range(0, len(self.records), self.at_once):
            records = self.records[start : start + self.at_once]
            batch = self.data.pack(records, np.arange(start, start + len(records)))
            part, samples = self._sampled(policy, batch, config)
            if self.rewards.success:
                part |= accuracy_sums("greedy_accuracy", self._greedy(policy, batch, records))
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in part.items()}
            shown = shown or samples
        names = ["greedy_accuracy", "sampled_accuracy", "pass_at_k"]
        names += [name for name in sums if name not in names and f"count of {name}" in sums]
        return {name: sums[name] / count for name in names if (count := sums.get(f"count of {name}"))}, shown

    def _sampled(self, policy, batch, config):
        """(sums over the prompts of a batch, samples to show)"""
        P, G = len(batch["number"]), config.group_size
        estimator = choose_estimator(config, policy)
        rollouts = with_reference(policy.sample(batch, 0, config), self.reference, estimator, config)
        scores, mask = score(policy, rollouts, config.temperature), rollouts.mask
        values, late = self.rewards.score(rollouts.texts, G)
        sums = {}
        if self.rewards.success:
            right = self.rewards.right(values).view(P, G)                            # NaN where not scored
            sums = accuracy_sums("sampled_accuracy", right) | pass_at_k_sums(right, config.pass_k)
        sums |= reward_sums(values)
        means = rollouts.texts.metrics | {"entropy": ((scores.entropy * mask).sum(), mask.sum())}
        kl = kl_per_token(scores, rollouts, estimator)
        if kl is not None:
            means["kl"] = ((kl * mask).sum(), mask.sum())
        for name, (total, count) in means.items():
            sums |= {name: total, f"count of {name}": count}
        return sums, self._samples(rollouts.texts, values, P, G)

    def _samples(self, texts, values, P, G):
        total = self.rewards.total(values).nan_to_num(0.0).view(P, G)
        samples, answers = [], texts.columns.get("answer", [None] * P * G)
        for i in range(min(SHOWN, P)):
            best, worst = int(total[i].argmax()), int(total[i].argmin())
            samples.append({"problem": texts.prompts[i * G], "answer": answers[i * G],
                            "best": texts.completions[i * G + best], "worst": texts.completions[i * G + worst],
                            "best_score": round(float(total[i, best]), 4),
                            "worst_score": round(float(total[i, worst]), 4)})
        return samples

    def _greedy(self, policy, batch, records):
        """(P,) whether the likeliest completion of each prompt is right, 1 or 0, NaN where not scored."""
        written, success = policy.greedy(batch, self.config), self.rewards.success
        prompts, columns = as_columns(records)
        texts = Texts(lambda: (prompts, written, columns), None, None, {}, 0)
        return self.rewards.right(self.rewards.score(texts, 1, [success])[0])


def accuracy_sums(name, right):
    """right: 1.0, 0.0, or NaN where not scored, which counts neither way."""
    return {name: right.nansum(), f"count of {name}": (~right.isnan()).sum()}


def pass_at_k_sums(right, k):
    """Sums of pass@k over the prompts of which at least k completions were scored. right: (P, G) as in accuracy_sums"""
    scored, found = (~right.isnan()).sum(1).tolist(), right.nansum(1).int().tolist()
    chances = [pass_at_k(r, n, k) for r, n in zip(found, scored, strict=True) if n >= k]
    return {"pass_at_k": sum(chances), "count of pass_at_k": len(chances)}
