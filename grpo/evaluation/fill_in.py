"""Held-out evaluation of a fill-in generator on fixed problems: by judges, and by metrics that use no judge."""

import re
from bisect import bisect_left, bisect_right
from dataclasses import replace
from functools import cached_property

import torch

from core.dataset_consumer import unpack_batch
from core.tokenizer import by_character, character_ends
from grpo.evaluation.means import add_up, means_of, reward_sums
from grpo.evaluation.ngram import NGramModel
from grpo.evaluation.samples import SHOWN, best_and_worst
from grpo.scoring import score, with_reference
from grpo.step_metrics import unique_completions

WORD = re.compile("[A-Za-z]+")
PROBLEMS_PER_STEP = 16   # the fixed problems are drawn in batches of this size, whatever batch_size is
NOISE_SEED = 99          # added to the seed of the problems, it is the seed of the sampling noise


def lexicon(text):
    """The words of a text, in lower case."""
    return {word.lower() for word in WORD.findall(text)}


def touched_words(tokenizer, truth, masked):
    """[(tokens, before, word, after)] of the words of a true text with at least one masked token. A word at the edge of
    the window is left out, because it may be cut.

    truth: token ids; masked: for each of them, whether it was masked
    tokens: the slice of truth that the word is made of; before, after: texts that these tokens hold besides the word,
    such as the space that a word piece begins with
    """
    text, ends = tokenizer.decode(truth), character_ends(tokenizer, truth)
    found = []
    for match in WORD.finditer(text):
        start, end = match.span()
        first, last = bisect_right(ends, start), bisect_left(ends, end)
        tokens = slice(first, last + 1)
        whole = start > 0 and end < len(text)
        if whole and any(masked[tokens]):
            begin = ends[first - 1] if first else 0
            found.append((tokens, text[begin:start], match[0], text[end : ends[last]]))
    return found


def word_between(text, before, after):
    """The part of a text between its beginning `before` and its end `after`; "" if it does not begin and end so."""
    length = len(text) - len(before) - len(after)
    if length > 0 and text.startswith(before) and text.endswith(after):
        return text[len(before) : len(before) + length]
    return ""


class FillInEvaluation:
    """Fixed problems and fixed noise, so that two policies are compared on the same draws.

    evaluation(policy, temperature) returns ({metric: mean over all completions of all problems}, samples to show):
      judge, gold_judge     score of the completed text
      reward/<name>         the other rewards of the run; and under their own names, the metrics that rewards log
      word_validity         of the words of the true text with a masked character, the share whose filled span is one
                            word of the training text; one-letter words separated by spaces do not count
      words_recovered       of the same words, the share whose filled span is the true word
      token_accuracy        share of masked tokens filled with the true one
      ngram_bits            -log2 of the probability that an n-gram model of the training text gives to a token, mean
                            over the tokens that are masked or come at most six after one
      kl                    exact KL to the reference per masked token, in nats, at the sampling temperature; with
                            several passes, in the first
      entropy               entropy of the policy per masked token, likewise
      unique_completions    number of distinct completions of a problem
    """

    columns = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "mean_token_accuracy", "grad_norm", "lr",
               "tokens_per_second")  # columns of the console line

    def __init__(self, data, reference, judges, rewards, config):
        """data: a DatasetConsumer with batches of PROBLEMS_PER_STEP; judges: {"judge", "gold_judge": a Judge or None}
        rewards: a Rewards or None; config: the run's"""
        self.data, self.reference = data, reference
        self.rewards = rewards
        self.judges = {name: judge for name, judge in judges.items() if judge is not None}
        self.config = replace(config, group_size=config.eval_completions, seed=data.seed + NOISE_SEED, train_pass_k=1,
                              fill_estimator="trajectory",
                              stored_megabytes=10**9)  # a batch is small, and the KL here is always exact
        self.batches = []  # (number of the drawn batch, part of it)
        for step, first in enumerate(range(0, config.eval_problems, PROBLEMS_PER_STEP)):
            batch = data.batch("val", step)
            size = min(PROBLEMS_PER_STEP, config.eval_problems - first)
            for start in range(0, size, config.batch_size):
                part = slice(start, min(size, start + config.batch_size))
                self.batches.append((step, {key: x[part] for key, x in batch.items()}))

    @cached_property
    def words(self):
        """The words of the training text, decoded at first use, because only one rank evaluates."""
        return lexicon(self.data.train_text())

    @cached_property
    def ngrams(self):
        """The n-gram model of the training text, made at first use, likewise."""
        return NGramModel(self.data.tokens["train"], self.data.tokenizer.vocab_size)

    @torch.no_grad()
    def __call__(self, policy, temperature):
        config = replace(self.config, temperature=temperature)
        sums, logged = {}, {}
        shown = []
        for step, batch in self.batches:
            rollouts = policy.sample(batch, step, config)
            values, total, log = self._rewards(rollouts, sums)
            self._add_words(batch, rollouts, sums)
            self._add_tokens(policy, step, batch, rollouts, config, sums)
            add_up(sums, reward_sums(values))
            if log is not None:
                add_up(logged, log.metrics)
            if len(shown) < SHOWN:
                shown += self._samples(batch, rollouts, total, values, log)
        return means_of(sums, logged), shown[:SHOWN]

    def _rewards(self, rollouts, sums):
        """Adds the judges' scores to the sums. Returns the other rewards {name: (N,)}, the reward (P, G) by which
        samples are chosen, and the Log of the rewards or None."""
        scores = {name: judge.scores(rollouts.texts) for name, judge in self.judges.items()}  # (N,) each
        add_up(sums, {name: (x.sum(), len(x)) for name, x in scores.items()})
        total = scores.get("judge", torch.zeros(len(rollouts.mask), device=rollouts.mask.device))
        names = []
        if self.rewards is not None:
            names = [name for name in self.rewards.names if name != "judge"]
        values, log = {}, None
        if names:
            values, log = self.rewards.score(rollouts.texts, rollouts.group_size, names)
            if "judge" not in scores:
                total = self.rewards.total(values).nan_to_num(0.0)
        return values, total.view(-1, rollouts.group_size), log

    def _add_tokens(self, policy, step, batch, rollouts, config, sums):
        """Adds the metrics of tokens to the sums. KL and entropy are measured in one pass over the problem."""
        G, mask = rollouts.group_size, rollouts.mask                                 # (N, M)
        first_pass = rollouts
        if config.unmask_steps > 1:
            first_pass = policy.sample(batch, step, replace(config, unmask_steps=1))
        first_pass = with_reference(first_pass, self.reference, "exact", config)
        scores = score(policy, first_pass, config.temperature)
        masked = mask[::G]                                                           # (P, M) all of a group are equal
        accuracy, _ = rollouts.texts.metrics["mean_token_accuracy"]
        found = {"token_accuracy": (accuracy, mask.sum())}
        if scores.kl is not None:
            found["kl"] = (scores.kl[::G] * masked).sum(), masked.sum()
        ids = torch.stack(rollouts.texts.tokens).cpu().numpy()                       # (N, T)
        unique = unique_completions(rollouts.by_problem(rollouts.target), rollouts.by_problem(mask))  # (P,)
        found["entropy"] = (scores.entropy[::G] * masked).sum(), masked.sum()
        found["ngram_bits"] = self.ngrams.bits_near(ids, batch["mask"].repeat(G, 0))
        found["unique_completions"] = unique.sum(), len(unique)
        add_up(sums, found)

    def _add_words(self, batch, rollouts, sums):
        """Adds the metrics of words to the sums."""
        tokenizer, G = self.data.tokenizer, rollouts.group_size
        _, target, mask = unpack_batch(batch, "cpu")                                 # (P, T) each
        words = valid = recovered = 0
        for i, (truth, masked) in enumerate(zip(target.tolist(), mask.tolist(), strict=True)):
            completions = [ids.tolist() for ids in rollouts.texts.tokens[i * G : i * G + G]]
            for tokens, before, word, after in touched_words(tokenizer, truth, masked):
                for ids in completions:
                    found = word_between(tokenizer.decode(ids[tokens]), before, after)
                    words += 1
                    valid += found.lower() in self.words
                    recovered += found == word
        add_up(sums, {"word_validity": (valid, words), "words_recovered": (recovered, words)})

    def _samples(self, batch, rollouts, total, values, log):
        """Records of the first problems with their best and worst completions."""
        tokenizer, records = self.data.tokenizer, []
        for i, (numbers, facts) in enumerate(best_and_worst(total, self.rewards, values, log)):
            texts = {"problem": batch["input"][i], "truth": batch["target"][i]}
            for name, n in numbers.items():
                texts[name] = rollouts.texts.tokens[n]
            shown, masks = {}, {}
            for name, ids in texts.items():
                shown[name] = tokenizer.decode(ids.tolist())
                masks[name] = by_character(tokenizer, ids.tolist(), batch["mask"][i].tolist())
            records.append(shown | facts | {"mask": masks})
        return records
