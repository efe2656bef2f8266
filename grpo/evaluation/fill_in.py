"""Held-out evaluation of a fill-in generator on fixed problems: by judges, and by metrics that use no judge."""

import re
from bisect import bisect_left, bisect_right
from dataclasses import replace
from functools import cached_property

import torch

from core.dataset_consumer import unpack_batch
from core.tokenizer import by_character, character_ends
from grpo.evaluation.ngram import NGramModel
from grpo.evaluation.samples import SHOWN, extra_columns, log_sums, reward_sums, under_own_names, verdicts
from grpo.scoring import score, with_reference
from grpo.step_metrics import unique_completions

WORD = re.compile("[A-Za-z]+")
PROBLEMS_PER_STEP = 16   # the fixed problems are drawn in batches of this size, whatever batch_size is
NOISE_SEED = 99          # added to the seed of the problems, it is the seed of the sampling noise


def lexicon(text):
    """The words of a text, in lower case."""
    return {word.lower() for word in WORD.findall(text)}


def touched_words(truth, mask):
    """[(start, end)] of the words of the true text with at least one masked character. A word at the edge of the window
    is left out, because it may be cut.

    truth: str; mask: for each of its characters, whether it was masked
    """
    spans = (match.span() for match in WORD.finditer(truth))
    return [(a, b) for a, b in spans if a > 0 and b < len(truth) and any(mask[a:b])]


def words_instead(spans, truth, ends, filled, filled_ends):
    """What the same tokens of a completion have in the place of words of the true text; "" where it is no word alone.

    spans: [(start, end)] of the words in truth; ends, filled_ends: character_ends of the true and of the filled text
    """
    for a, b in spans:
        first, last = bisect_right(ends, a), bisect_left(ends, b)
        start, filled_start = (e[first - 1] if first else 0 for e in (ends, filled_ends))
        before, after = truth[start:a], truth[b : ends[last]]  # such as the space that a word piece begins with
        found = filled[filled_start : filled_ends[last]]
        whole = found.startswith(before) and found.endswith(after) and len(found) > len(before) + len(after)
        yield found[len(before) : len(found) - len(after)] if whole else ""


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
        rewards: a Rewards or None; config: the run's, with eval_problems and eval_completions"""
        self.data, self.reference, self.rewards = data, reference, rewards
        self.judges = {name: judge for name, judge in judges.items() if judge is not None}
        self.config = replace(config, group_size=config.eval_completions, seed=data.seed + NOISE_SEED, train_pass_k=1,
                              fill_estimator="trajectory",
                              stored_megabytes=10**9)  # a batch is small, and the KL here is always exact
        self.batches = []  # (number of the drawn batch, part of it)
        for first in range(0, config.eval_problems, PROBLEMS_PER_STEP):
            step, size = first // PROBLEMS_PER_STEP, min(PROBLEMS_PER_STEP, config.eval_problems - first)
            batch = data.batch("val", step)
            for cut in range(0, size, config.batch_size):
                part = slice(cut, min(size, cut + config.batch_size))
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
        sums, shown = {}, []
        for step, batch in self.batches:
            part, samples = self._batch(policy, step, batch, replace(self.config, temperature=temperature),
                                        len(shown) < SHOWN)
            sums |= {name: sums.get(name, 0.0) + value for name, value in part.items()}
            shown = (shown + samples)[:SHOWN]
        N = self.config.eval_problems * self.config.group_size
        per = {"judge": N, "gold_judge": N, "word_validity": sums["words"], "words_recovered": sums["words"],
               "token_accuracy": sums["tokens"], "kl": sums["places"], "entropy": sums["places"],
               "ngram_bits": sums["ngram_tokens"], "unique_completions": self.config.eval_problems}
        per |= {name: sums[f"count of {name}"] for name in sums if f"count of {name}" in sums}
        metrics = {name: float(sums[name] / count) for name, count in per.items() if name in sums and count}
        return under_own_names(metrics), shown

    def _batch(self, policy, step, batch, config, wants_samples):
        """Returns (sums over the completions of a batch, samples to show)."""
        rollouts, G = policy.sample(batch, step, config), config.group_size
        first_pass = rollouts
        if config.unmask_steps > 1:  # KL and entropy are measured in one pass over the problem
            first_pass = policy.sample(batch, step, replace(config, unmask_steps=1))
        first_pass = with_reference(first_pass, self.reference, "exact", config)
        scores, mask, texts = score(policy, first_pass, config.temperature), rollouts.mask, rollouts.texts
        one = mask[::G]                                                              # (P, M) the masked places
        sums = {"places": one.sum(), "entropy": (scores.entropy[::G] * one).sum(), "tokens": mask.sum(),
                "token_accuracy": texts.metrics["mean_token_accuracy"][0],
                "unique_completions": unique_completions(rollouts.target, mask, G).sum()}
        if scores.kl is not None:
            sums["kl"] = (scores.kl[::G] * one).sum()
        values = {name: judge.scores(texts) for name, judge in self.judges.items()}
        sums |= {name: x.sum() for name, x in values.items()}
        total = values.get("judge", torch.zeros(len(mask), device=mask.device))
        names = [name for name in self.rewards.names if name != "judge"] if self.rewards is not None else []
        log, others = None, {}
        if names:
            others, _, log = self.rewards.score(texts, G, names)
            sums |= reward_sums(others) | log_sums(log)
            if "judge" not in values:
                total = self.rewards.total(others).nan_to_num(0.0)
        _, target, masked = unpack_batch(batch, "cpu")                                # (P, T) each
        text = torch.stack(texts.tokens).cpu().unflatten(0, (len(target), G))        # (P, G, T)
        samples = self._samples(batch, text, total.view(-1, G), others, log) if wants_samples else []
        bits = self.ngrams.bits_near(text.flatten(0, 1).numpy(), masked.repeat_interleave(G, 0).numpy())
        sums |= dict(zip(("ngram_bits", "ngram_tokens"), bits, strict=True))
        return sums | self._words(target, masked, text), samples

    def _words(self, target, mask, text):
        words = valid = recovered = 0
        for truth, masked, completions in zip(target.tolist(), mask.tolist(), text.tolist(), strict=True):
            true_text, hidden = self.data.tokenizer.decode(truth), by_character(self.data.tokenizer, truth, masked)
            spans = touched_words(true_text, hidden)
            ends = character_ends(self.data.tokenizer, truth)
            for ids in completions:
                found = list(words_instead(spans, true_text, ends, self.data.tokenizer.decode(ids),
                                           character_ends(self.data.tokenizer, ids)))
                words += len(spans)
                valid += sum(word.lower() in self.words for word in found)
                recovered += sum(word == true_text[a:b] for word, (a, b) in zip(found, spans, strict=True))
        return {"words": words, "word_validity": valid, "words_recovered": recovered}

    def _samples(self, batch, text, total, values, log):
        """Records of the first problems with their best and worst completions. total: (P, G) rewards; values: those but
        the judge, {name: (N,)}"""
        records, G = [], total.shape[1]
        for i in range(min(SHOWN, len(text))):
            best, worst = int(total[i].argmax()), int(total[i].argmin())
            texts = {"problem": batch["input"][i], "truth": batch["target"][i], "best": text[i, best],
                     "worst": text[i, worst]}
            scores = {"best_score": round(float(total[i, best]), 4), "worst_score": round(float(total[i, worst]), 4)}
            shown = {name: self.data.tokenizer.decode(ids.tolist()) for name, ids in texts.items()}
            mask = batch["mask"][i].tolist()
            masks = {name: by_character(self.data.tokenizer, ids.tolist(), mask) for name, ids in texts.items()}
            numbers = i * G + best, i * G + worst
            about = verdicts(self.rewards, values, *numbers) | extra_columns(log, *numbers)
            records.append(shown | scores | about | {"mask": masks})
        return records
