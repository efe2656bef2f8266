"""Held-out evaluation of a causal generator: is it right, how often, and at what length."""

from dataclasses import replace
from math import comb

import numpy as np
import torch

from core.sampling import Stop, generate
from grpo.objectives import KL_ESTIMATORS
from grpo.rewards import as_columns
from grpo.rollout import collect
from grpo.scoring import score, with_reference

CHUNK = 64  # prompts per generation
SHOWN = 3   # samples for people


def pass_at_k(right, n, k):
    """The chance that k of n completions, of which `right` are right, hold a right one (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - right, k) / comb(n, k)


class PromptEvaluation:
    """Fixed validation prompts and fixed noise, so that two policies are compared on the same draws.

    evaluate(policy, temperature) returns a few samples to show and
      greedy_accuracy     share of prompts whose likeliest completion is right: success_reward gives it its most; this
                          and the next two are left out if no reward says what is right
      sampled_accuracy    share of right completions among those sampled as in training
      pass_at_k           chance that k sampled completions hold a right one, k = config.pass_k
      reward/<name>       mean over the sampled completions
      completion_length   tokens, the stop token included
      truncated           share of completions that ran out of room
      kl, entropy         per token of the sampled completions; KL to the reference by the run's estimator
    """

    columns = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "completion_length", "truncated", "grad_norm",
               "lr", "tokens_per_second")  # of the console line

    def __init__(self, data, reference, rewards, config, dist, dtype):
        self.data, self.reference, self.rewards, self.dist, self.dtype = data, reference, rewards, dist, dtype
        if config.eval_completions < 2:
            raise ValueError(f"eval_completions={config.eval_completions} must be at least 2 for prompts")
        self.config = replace(config, group_size=config.eval_completions, seed=99, train_pass_k=1)
        if config.pass_k > config.eval_completions:
            raise ValueError(f"pass_k={config.pass_k} must be at most eval_completions={config.eval_completions}")
        self.records = data.records["val"][: config.eval_problems]

    @torch.no_grad()
    def __call__(self, policy, temperature):
        sums, shown = {}, []
        for start in range(0, len(self.records), CHUNK):
            records = self.records[start : start + CHUNK]
            batch = self.data.pack(records, np.arange(start, start + len(records)))
            part, samples = self._sampled(policy, batch, temperature)
            if self.rewards.success:
                part["greedy_accuracy"] = float(self._greedy(policy, batch, records).sum())
            sums = {name: sums.get(name, 0.0) + float(value) for name, value in part.items()}
            shown = shown or samples
        P, N = len(self.records), len(self.records) * self.config.group_size
        per = {"greedy_accuracy": P, "pass_at_k": P, "kl": sums["tokens"], "entropy": sums["tokens"]}
        per |= {f"reward/{name}": max(1.0, sums[f"scored/{name}"]) for name in self.rewards.names}
        order = ["greedy_accuracy", "sampled_accuracy", "pass_at_k"]
        order += [name for name in sums if name not in (*order, "tokens") and not name.startswith("scored/")]
        return {name: sums[name] / per.get(name, N) for name in order if name in sums}, shown

    def _sampled(self, policy, batch, temperature):
        """(sums over the prompts of a batch, samples to show)"""
        c, P, G = replace(self.config, temperature=temperature), len(batch["input"]), self.config.group_size
        autocast = self.dist.autocast(self.dtype)
        rollouts = collect(policy, batch, 0, c, self.data.tokenizer, self.dist.device, autocast)
        rollouts = with_reference(rollouts, self.reference, temperature, CHUNK, autocast)
        with autocast:
            said, (_, _, values) = score(policy, rollouts, temperature), self.rewards(rollouts)
        kl = said.kl
        if rollouts.ref_logp is not None:
            kl = KL_ESTIMATORS[rollouts.kl_estimator](said.logp, rollouts.ref_logp)
        sums = {}
        if self.rewards.success:
            right = self.rewards.right(values).view(P, G).sum(1).tolist()
            sums = {"sampled_accuracy": sum(right), "pass_at_k": sum(pass_at_k(r, G, c.pass_k) for r in right)}
        for name, x in values.items():
            sums |= {f"reward/{name}": x.nansum(), f"scored/{name}": (~x.isnan()).sum()}
        sums |= {"completion_length": rollouts.mask.sum(), "truncated": rollouts.truncated.sum(),
                "tokens": rollouts.mask.sum(), "entropy": (said.entropy * rollouts.mask).sum()}
        if kl is not None:
            sums["kl"] = (kl * rollouts.mask).sum()
        prompts, texts, columns = rollouts.texts()
        weighted = zip(self.rewards.weights, values.values(), strict=True)
        total = sum(w * x.nan_to_num(0.0) for w, x in weighted).view(P, G)
        samples = []
        for i in range(min(SHOWN, P)):
            best, worst = int(total[i].argmax()), int(total[i].argmin())
            samples.append({"problem": prompts[i * G], "answer": columns.get("answer", [None] * P * G)[i * G],
                            "best": texts[i * G + best], "worst": texts[i * G + worst],
                            "best_score": round(float(total[i, best]), 4),
                            "worst_score": round(float(total[i, worst]), 4)})
        return sums, samples

    def _greedy(self, policy, batch, records):
        """(P,) bool: whether the likeliest completion of each prompt is right."""
        c, device = self.config, self.dist.device
        stop = Stop(self.data.tokenizer, c.stop_sequences, c.response_prefix)
        with self.dist.autocast(self.dtype):
            prompt, padding = (torch.from_numpy(batch[name]).to(device) for name in ("input", "padding"))
            out = generate(policy, prompt, padding, torch.zeros(len(records), 1, c.max_new_tokens), stop, temperature=0)
        texts = [stop.text(ids[: int(n)]) for ids, n in zip(out.target.tolist(), out.mask.sum(1), strict=True)]
        success, (prompts, columns) = self.rewards.success, as_columns(records)
        return self.rewards.right({success: self.rewards.of_texts(success, prompts, columns, texts, group_size=1)})
