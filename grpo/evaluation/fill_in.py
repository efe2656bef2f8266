"""Held-out evaluation of a fill-in generator on fixed problems: by judges, and by metrics that use no judge."""

import re
from bisect import bisect_left, bisect_right
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from core.tokenizer import character_ends, masked_spans
from grpo.evaluation.samples import Evaluation, reward_sums
from grpo.metrics import unique_completions
from grpo.sampling_settings import SamplingSettings
from grpo.step_settings import StepSettings

WORD = re.compile("[A-Za-z]+")
PROBLEMS_PER_STEP = 16  # batch size for drawing the fixed problems, whatever the run's batch_size
NOISE_SEED = 99         # seed of the sampling noise minus the seed of the problems


def touched_words(tokenizer, truth, masked):
    """Finds the words of a true text with at least one masked token: [(tokens, before, word, after)]. Leaves out words
    at the edge of the window, which may be cut.

    truth: the ids of its tokens; masked: True for each masked token
    tokens: the slice of truth that holds the word; before, after: the rest of the text of these tokens, such as the
        space at the beginning of a word piece
    """
    text = tokenizer.decode(truth)
    ends = [0, *character_ends(tokenizer, truth)]
    found = []
    for match in WORD.finditer(text):
        start, end = match.span()
        first = bisect_right(ends, start) - 1
        last = bisect_left(ends, end)
        is_whole = start > 0 and end < len(text)
        if is_whole and any(masked[first:last]):
            before = text[ends[first] : start]
            after = text[end : ends[last]]
            tokens = slice(first, last)
            found.append((tokens, before, match[0], after))
    return found


class FillInEvaluation(Evaluation):
    """The first eval_problems validation windows, filled in eval_completions times each."""

    columns = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "mean_token_accuracy", "grad_norm")

    def __init__(self, data, reference, judges, rewards, config, dist):
        """
        data: a DatasetConsumer with batches of PROBLEMS_PER_STEP
        judges: {"judge", "gold_judge": a Judge or None}
        rewards: a Rewards or None; config: the run's
        """
        config = config.for_evaluation(data.seed + NOISE_SEED)
        super().__init__(reference, rewards, config, dist)
        self.data = data
        self.judges = judges
        self.credit = None  # (N, M) rewards of the sampled tokens of the last batch, with a credit_window
        self.batches = []
        for first in range(0, config.eval_problems, PROBLEMS_PER_STEP):
            step = first // PROBLEMS_PER_STEP
            left = config.eval_problems - first
            columns = data.batch("val", step)
            batch = {key: x[:left] for key, x in columns.items()}
            self.batches.append((step, batch))

    @cached_property
    def words(self):
        """The words of the training text in lower case, decoded at the first evaluation."""
        text = self.data.train_text()
        return {word.lower() for word in WORD.findall(text)}

    def judge_scores(self, texts):
        """The scores of the judges. The judge named "judge" may be a reward of the run."""
        window = self.config.credit_window
        scores = {}
        for name, judge in self.judges.items():
            if judge is None:
                continue
            if name == "judge" and window is not None:
                scores[name], credit = judge.read(texts, window)
                self.credit = credit.nan_to_num().tolist()
            else:
                scores[name] = judge.scores(texts)
        return scores

    def sums(self, policy, step, batch, rollouts, values, config):
        """{metric: (sum, count)} of words, rewards and tokens; KL and entropy are measured for filling in all tokens in
        one pass."""
        sums = self._word_sums(batch, rollouts) | reward_sums(values)
        sums["token_accuracy"] = rollouts.texts.metrics["mean_token_accuracy"]
        settings = replace(StepSettings.of(config, policy), kl_estimator="exact")
        first_pass = rollouts
        if config.unmask_steps > 1:
            of_one_pass = SamplingSettings.of(config.varied(unmask_steps=1))
            first_pass = policy.sample(batch, step, of_one_pass)
        # One completion of each group is scored: all start from the same text, so their first passes have the same
        # distributions
        sums |= self.model_sums(policy, first_pass, settings, every=rollouts.group_size)
        target = rollouts.by_problem(rollouts.target)                                # (P, G, M)
        mask = rollouts.by_problem(rollouts.mask)                                    # (P, G, M)
        unique = unique_completions(target, mask)                                    # (P,)
        sums["unique_completions"] = unique.sum(), len(unique)
        return sums

    def _word_sums(self, batch, rollouts):
        """{metric: (sum, count) of each problem, (P,) each} of words."""
        tokenizer = self.data.tokenizer
        G = rollouts.group_size
        counts = np.zeros((5, len(batch["mask"])))  # adding to an element of a tensor takes thirty times as long
        words, valid, recovered, places, distinct = counts
        for i, masked in enumerate(batch["mask"]):
            truth = batch["target"][i].tolist()
            first = i * G
            completions = rollouts.texts.completion_ids[first : first + G]
            for tokens, before, word, after in touched_words(tokenizer, truth, masked):
                texts = [tokenizer.decode(ids[tokens]) for ids in completions]
                places[i] += 1
                distinct[i] += len(set(texts))
                for text in texts:
                    found = text.removeprefix(before)
                    found = found.removesuffix(after)
                    is_framed = text == before + found + after  # the completion has the rest unchanged
                    words[i] += 1
                    valid[i] += is_framed and found.lower() in self.words
                    recovered[i] += text == before + word + after
        words, valid, recovered, places, distinct = torch.from_numpy(counts)
        return {
            "word_validity": (valid, words),
            "words_recovered": (recovered, words),
            "distinct_words": (distinct, places)}

    def marks(self, batch, rollouts, n):
        """[[first, end]] of the characters of each masked token and, with a credit_window, its reward."""
        problem = n // rollouts.group_size
        masked = batch["mask"][problem].tolist()
        ids = rollouts.texts.tokens[n].tolist()
        marks = {"filled": masked_spans(self.data.tokenizer, ids, masked)}
        if self.credit:
            marks["credit"] = self.credit[n][: sum(masked)]
        return marks
