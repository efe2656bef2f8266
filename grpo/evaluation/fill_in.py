"""Held-out evaluation on a fixed set of validation problems: what the judge sees, and what it does not."""

import re

import torch

from core.batch import masked_positions, unpack_batch
from core.judge import calculate_judge_scores
from core.losses import entropy, exact_kl, sampling_logp
from core.sampling import draw_uniforms, fill_in, fill_in_passes, predict_and_sample_tokens
from grpo.scoring import visiting
from grpo.step_metrics import unique_completions

WORD = re.compile("[A-Za-z]+")
CHUNK = 16  # problems per forward
SHOWN = 3   # samples for people


def lexicon(text):
    """The words of a text, in lower case."""
    return {word.lower() for word in WORD.findall(text)}


def touched_words(truth, mask):
    """(start, end) of the words of the true text that a mask touches; words cut by the window's edge do not count.

    truth: str; mask: (T,) bool
    """
    spans = (match.span() for match in WORD.finditer(truth))
    return [(a, b) for a, b in spans if a > 0 and b < len(truth) and mask[a:b].any()]


class Evaluation:
    """Fixed problems and fixed noise, so that two policies are compared on the same draws.

    evaluate(policy, temperature) returns a few samples to show and, each a mean over all completions of all problems:
      judge, gold_judge     score of the completed text
      reward/<name>         of the other rewards of the run
      word_validity         of the words of the true text that a mask touches, the share whose filled span is one word
                            of the training text: spaces cannot cut a gap into one-letter words
      words_recovered       ... whose filled span is the true word
      token_accuracy        hidden tokens that equal the true ones
      kl                    exact KL to the reference per hidden token, in nats, at the sampling temperature, given the
                            problem alone (of several passes, the first)
      entropy               of the policy per hidden token, likewise
      unique_completions    distinct completions of a group
    """

    columns = ("loss", "mean_reward", "std_reward", "mean_kl", "entropy", "mean_token_accuracy", "grad_norm", "lr",
               "tokens_per_second")  # of the console line

    def __init__(self, data, reference, judge, gold_judge, problems, group_size, truncation, dist, dtype, rewards=None,
                 passes=1):
        self.reference, self.judge, self.gold_judge = reference, judge, gold_judge
        self.rewards, self.passes = rewards, passes
        self.group_size, self.truncation, self.dist, self.dtype = group_size, truncation, dist, dtype
        self.tokenizer, self.words = data.tokenizer, lexicon(data.train_text())
        self.problems = []
        for step in range(-(-problems // data.batch_size)):
            batch = data.batch("val", step)
            noise = draw_uniforms(data.seed + 99, step, batch["number"], (2, group_size, data.block_size))
            self.problems += list(zip(*unpack_batch(batch, dist.device), noise, strict=True))
        self.problems = self.problems[:problems]

    @torch.no_grad()
    def __call__(self, policy, temperature):
        sums, shown = {}, []
        for i in range(0, len(self.problems), CHUNK):
            input, target, mask, noise = (torch.stack(x) for x in zip(*self.problems[i : i + CHUNK], strict=True))
            with self.dist.autocast(self.dtype):
                part, text, score = self._forward(policy, input, target, mask, noise, temperature)
            values = self._rewards(input, target, text) if self.others() else {}
            if score is None and values:
                weights = dict(zip(self.rewards.names, self.rewards.weights, strict=True))
                score = sum(weights[name] * x.nan_to_num(0.0) for name, x in values.items())
            for name, x in values.items():
                part |= {f"reward/{name}": x.nansum(), f"scored/{name}": (~x.isnan()).sum()}
            for name, value in (part | self._words(target, mask, text)).items():
                sums[name] = sums.get(name, 0.0) + value
            if i == 0:
                shown = best_and_worst(input, target, mask, text, score, self.tokenizer)
        N = len(self.problems) * self.group_size
        words = max(1, sums["words"])
        per = {"judge": N, "gold_judge": N, "word_validity": words, "words_recovered": words,
               "token_accuracy": sums["tokens"] * self.group_size, "kl": sums["tokens"], "entropy": sums["tokens"],
               "unique_completions": len(self.problems)}
        per |= {f"reward/{name}": max(1, sums[f"scored/{name}"]) for name in self.others()}
        if not sums["words"]:  # a text of numbers
            del per["word_validity"], per["words_recovered"]
        return {name: float(sums[name] / per[name]) for name in per if name in sums}, shown

    def others(self):
        """The rewards that are functions of text."""
        return [name for name in self.rewards.names if name != "judge"] if self.rewards is not None else []

    def _forward(self, policy, input, target, mask, noise, temperature):
        position, chosen = masked_positions(mask, input.device)                      # (P, M)
        logits = policy(input, position)                                             # (P, M, V) read once, used twice
        if self.passes == 1:
            tokens, _ = predict_and_sample_tokens(lambda *_: logits, input, position, noise[:, 0], temperature,
                                                  *self.truncation)
        else:
            tokens, *_ = fill_in_passes(policy, input, position, chosen, noise[:, 0], noise[:, 1], self.passes,
                                        temperature, *self.truncation)
            tokens = tokens.view(len(input), self.group_size, -1)                    # (P, G, M)
        text = fill_in(input, position, chosen, tokens)                              # (P, G, T)
        logp = sampling_logp(logits, temperature)                                    # (P, M, V)
        truth = target.gather(1, position)[:, None]                                  # (P, 1, M)
        repeated = chosen.repeat_interleave(self.group_size, 0)                      # (N, M)
        sums = {"tokens": chosen.sum(), "entropy": (entropy(logp) * chosen).sum(),
                "token_accuracy": ((tokens == truth) * chosen[:, None]).sum(),
                "unique_completions": unique_completions(tokens.flatten(0, 1), repeated, self.group_size).sum()}
        if self.reference is not None:
            with visiting(self.reference, input.device):
                ref_logp = sampling_logp(self.reference(input, position), temperature)
            sums["kl"] = (exact_kl(logp, ref_logp) * chosen).sum()
        scores = {name: calculate_judge_scores(judge, text.flatten(0, 1), self.tokenizer.cls_token_id)
                  for name, judge in (("judge", self.judge), ("gold_judge", self.gold_judge)) if judge is not None}
        sums |= {name: score.sum() for name, score in scores.items()}
        return sums, text, scores["judge"].view(text.shape[:2]) if "judge" in scores else None

    def _rewards(self, input, target, text):
        """{name: (P, G)} of the rewards that read text."""
        P, G = text.shape[:2]
        repeated = lambda x: [self.tokenizer.decode(ids) for ids in x.tolist() for _ in range(G)]
        texts = [self.tokenizer.decode(ids) for ids in text.flatten(0, 1).tolist()]
        return {name: self.rewards.of_texts(name, repeated(input), {"answer": repeated(target)}, texts, G).view(P, G)
                for name in self.others()}

    def _words(self, target, mask, text):
        words = valid = recovered = 0
        for truth, hidden, completions in zip(target.tolist(), mask.numpy(), text.tolist(), strict=True):
            truth = self.tokenizer.decode(truth)
            spans = touched_words(truth, hidden)
            for completion in map(self.tokenizer.decode, completions):
                words += len(spans)
                valid += sum(completion[a:b].lower() in self.words for a, b in spans)
                recovered += sum(completion[a:b] == truth[a:b] for a, b in spans)
        return {"words": words, "word_validity": valid, "words_recovered": recovered}


def best_and_worst(input, target, mask, text, score, tokenizer):
    """The first few problems with their best and worst completion by the judge, as plain records. score: (P, G)"""
    records = []
    for i in range(min(SHOWN, len(input))):
        best, worst = (int(score[i].argmax()), int(score[i].argmin())) if score is not None else (0, -1)
        texts = {"problem": input[i], "truth": target[i], "best": text[i, best], "worst": text[i, worst]}
        records.append({name: tokenizer.decode(ids.tolist()) for name, ids in texts.items()}
                       | {f"{name}_score": None if score is None else round(float(score[i, j]), 4)
                          for name, j in (("best", best), ("worst", worst))} | {"mask": mask[i].int().tolist()})
    return records
