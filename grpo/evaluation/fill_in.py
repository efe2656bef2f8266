"""Held-out evaluation of a fill-in generator on fixed problems: by judges, and by metrics that use no judge."""

import re
from bisect import bisect_left, bisect_right
from dataclasses import replace
from functools import cached_property

import torch

from core.tokenizer import by_character, character_ends
from grpo.evaluation.prompts import masked_sum, means_of, reward_sums
from grpo.evaluation.samples import SHOWN, best_and_worst
from grpo.scoring import score, with_reference
from grpo.step_metrics import unique_completions

WORD = re.compile("[A-Za-z]+")
PROBLEMS_PER_STEP = 16   # the fixed problems are drawn in batches of this size, whatever batch_size is
NOISE_SEED = 99          # added to the seed of the problems, it is the seed of the sampling noise


def touched_words(tokenizer, truth, masked):
    """[(tokens, before, word, after)] of the words of a true text with at least one masked token. A word at the edge of
    the window is left out, because it may be cut.

    truth: token ids; masked: for each of them, whether it was masked
    tokens: the slice of truth that the word is made of; before, after: texts that these tokens hold besides the word,
    such as the space that a word piece begins with
    """
    text = tokenizer.decode(truth)
    ends = [0, *character_ends(tokenizer, truth)]
    found = []
    for match in WORD.finditer(text):
        start, end = match.span()
        first = bisect_right(ends, start) - 1
        last = bisect_left(ends, end)
        if start > 0 and end < len(text) and any(masked[first:last]):
            before, after = text[ends[first] : start], text[end : ends[last]]
            found.append((slice(first, last), before, match[0], after))
    return found


class FillInEvaluation:
    """Fixed problems and fixed noise, so that two policies are compared on the same draws.

    evaluation(policy, temperature) returns ({metric: mean over all completions of all problems}, samples to show);
    docs/metrics.md has the metrics.
    """

    # columns of the console line
    columns = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "mean_token_accuracy", "grad_norm")

    def __init__(self, data, reference, judges, rewards, config):
        """data: a DatasetConsumer with batches of PROBLEMS_PER_STEP; judges: {"judge", "gold_judge": a Judge or None}
        rewards: a Rewards or None; config: the run's"""
        self.data, self.reference = data, reference
        self.rewards = rewards
        self.judges = {name: judge for name, judge in judges.items() if judge is not None}
        self.config = config.for_evaluation(data.seed + NOISE_SEED)
        self.batches = []  # (number of the drawn batch, part of it)
        for step, first in enumerate(range(0, config.eval_problems, PROBLEMS_PER_STEP)):
            batch = data.batch("val", step)
            size = min(PROBLEMS_PER_STEP, config.eval_problems - first)
            for start in range(0, size, config.batch_size):
                part = slice(start, min(size, start + config.batch_size))
                cut = {key: x[part] for key, x in batch.items()}
                self.batches.append((step, cut))

    @cached_property
    def words(self):
        """The words of the training text in lower case, decoded at first use, because only one rank evaluates."""
        return {word.lower() for word in WORD.findall(self.data.train_text())}

    @torch.no_grad()
    def __call__(self, policy, temperature):
        config = replace(self.config, temperature=temperature)
        sums, logged = [], [{}]
        shown = []
        for step, batch in self.batches:
            rollouts = policy.sample(batch, step, config)
            values, log = self._other_rewards(rollouts)
            if log is not None:
                logged.append(log.metrics)
            total = torch.zeros(len(rollouts.mask))                                  # (N,) orders the samples
            if values and "judge" not in self.judges:
                total = self.rewards.total(values)
            for name, judge in self.judges.items():
                scores = judge.scores(rollouts.texts)                                # (N,)
                sums.append({name: (scores.sum(), len(scores))})
                if name == "judge":
                    total = scores
            sums.append(self._word_sums(batch, rollouts))
            sums.append(self._token_sums(policy, step, batch, rollouts, config))
            sums.append(reward_sums(values))
            if len(shown) < SHOWN:
                shown += self._samples(policy, batch, rollouts, total, values, log)
        return means_of(sums, logged), shown[:SHOWN]

    def _other_rewards(self, rollouts):
        """The rewards {name: (N,)} of the run without that of the judge, and their Log, or None without any."""
        names = [name for name in getattr(self.rewards, "names", ()) if name != "judge"]
        if not names:
            return {}, None
        return self.rewards.score(rollouts.texts, rollouts.group_size, names)

    def _token_sums(self, policy, step, batch, rollouts, config):
        """{metric: (sum, count)} of tokens. KL and entropy are measured in one pass over the problem."""
        G, mask = rollouts.group_size, rollouts.mask                                 # (N, M)
        first_pass = rollouts
        if config.unmask_steps > 1:
            first_pass = policy.sample(batch, step, replace(config, unmask_steps=1))
        first_pass = with_reference(first_pass, self.reference, "exact", config)
        scores = score(policy, first_pass, config.temperature)
        masked = mask[::G]                                                           # (P, M) all of a group are equal
        sums = {"token_accuracy": rollouts.texts.metrics["mean_token_accuracy"]}
        if scores.kl is not None:
            sums["kl"] = masked_sum(scores.kl[::G], masked)
        sums["entropy"] = masked_sum(scores.entropy[::G], masked)
        target = rollouts.by_problem(rollouts.target)                                # (P, G, M)
        unique = unique_completions(target, rollouts.by_problem(mask))               # (P,)
        sums["unique_completions"] = unique.sum(), len(unique)
        return sums

    def _word_sums(self, batch, rollouts):
        """{metric: (sum, count)} of words."""
        tokenizer, G = self.data.tokenizer, rollouts.group_size
        words = valid = recovered = 0
        for i, masked in enumerate(batch["mask"]):
            truth = batch["target"][i].tolist()
            completions = rollouts.texts.completion_ids[i * G : i * G + G]
            for tokens, before, word, after in touched_words(tokenizer, truth, masked):
                for ids in completions:
                    text = tokenizer.decode(ids[tokens])
                    found = text.removeprefix(before).removesuffix(after)
                    words += 1
                    valid += found.lower() in self.words and text == before + found + after
                    recovered += text == before + word + after
        return {"word_validity": (valid, words), "words_recovered": (recovered, words)}

    def _samples(self, policy, batch, rollouts, total, values, log):
        """Samples, with the characters that were masked. total: (N,) the rewards that order them"""
        tokenizer, records = self.data.tokenizer, []
        samples = best_and_worst(policy, rollouts, total, self.rewards, values, log, "truth")
        for i, (record, numbers) in enumerate(samples):
            texts = {"problem": batch["input"][i], "truth": batch["target"][i]}
            texts |= {name: rollouts.texts.tokens[n] for name, n in numbers.items()}
            masked = batch["mask"][i].tolist()
            masks = {name: by_character(tokenizer, ids.tolist(), masked) for name, ids in texts.items()}
            records.append(record | {"mask": masks})
        return records
