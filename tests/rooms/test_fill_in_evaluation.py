"""The held-out evaluation of fill-in: its figures are those of a loop over completions."""

import dataclasses
import random
import re
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.distributions import sampling_logp
from core.judge import CHUNK
from grpo.build import FILL_IN, Models, fill_in_evaluation, make_rewards
from grpo.evaluation.fill_in import NOISE_SEED, PROBLEMS_PER_STEP, FillInEvaluation, touched_words
from grpo.reward_functions.judge import Judge
from grpo.reward_functions.registry import reward
from grpo.sampling_settings import SamplingSettings
from tests.tiny import TOKENIZER, config, consumer, count_rows, fill_policy, judge, one_process


def evaluation_of(dataset, reference=None, scorer=None, gold=None, **settings):
    c = config(**{"eval_problems": 6, "eval_completions": 3} | settings)
    data = consumer(dataset, dataclasses.replace(c, batch_size=PROBLEMS_PER_STEP))
    return FillInEvaluation(data, reference, {"judge": scorer, "gold_judge": gold}, None, c, one_process())


def reader(seed=5):
    return Judge(judge(seed), TOKENIZER, reads_ids=True)


class Pieces:
    """A tokenizer whose tokens are pieces of text: an id is a piece."""

    def decode(self, pieces):
        return "".join(pieces)


def test_a_word_is_right_or_known_only_where_its_tokens_hold_what_was_around_it():
    batch = {"target": np.array([["the", " dog", " runs."]]), "mask": np.array([[0, 1, 0]])}
    pieces = [["the", x, " runs."] for x in (" dog", " cat", " Cat", " cat", "cat", " dogs")]
    rollouts = SimpleNamespace(group_size=6, texts=SimpleNamespace(completion_ids=pieces))
    evaluation = SimpleNamespace(data=SimpleNamespace(tokenizer=Pieces()), words={"dog", "cat"})
    found = FillInEvaluation._word_sums(evaluation, batch, rollouts)
    counts = {name: tuple(map(float, pair)) for name, pair in found.items()}
    assert counts == {"word_validity": (4, 6), "words_recovered": (1, 6), "distinct_words": (5, 1)}


def words_of(text):
    """[(start, end)] of the words of a text, by a walk over its characters."""
    found, start = [], None
    for i, c in enumerate(f"{text} "):
        is_letter = c.isascii() and c.isalpha()
        if is_letter and start is None:
            start = i
        if not is_letter and start is not None:
            found.append((start, i))
            start = None
    return found


def test_touched_words_are_those_of_a_walk_over_characters():
    random.seed(0)
    count = 0
    for _ in range(300):
        pieces = ["".join(random.choice("ab, ") for _ in range(random.choice((1, 1, 2, 3)))) for _ in range(8)]
        masked = [random.random() < 0.3 for _ in pieces]
        owner = [n for n, piece in enumerate(pieces) for _ in piece]  # the token of each character
        text, expected = "".join(pieces), []
        for start, end in words_of(text):
            tokens = sorted(set(owner[start:end]))
            if 0 < start and end < len(text) and any(masked[n] for n in tokens):
                held = "".join(pieces[n] for n in tokens)
                before = start - owner.index(tokens[0])
                after = before + end - start
                expected.append((slice(tokens[0], tokens[-1] + 1), held[:before], held[before:after], held[after:]))
        assert touched_words(Pieces(), pieces, masked) == expected
        count += len(expected)
    assert count > 100


def test_the_credit_beside_a_filled_token_is_the_mean_log_odds_around_it(dataset):
    evaluation = evaluation_of(dataset, None, reader(), credit_window=2, judge_checkpoint="j",
                               reward_functions=("judge",), task_type="general")
    _, shown = evaluation(fill_policy(scale=3.0), 1.0)
    batch = evaluation.data.batch("val", 0)
    for i, sample in enumerate(shown):
        places = np.flatnonzero(batch["mask"][i])
        for about in sample["group"]:
            ids = torch.tensor([TOKENIZER.encode(about["text"])])
            p = judge(5)(ids).sigmoid()[0].clamp(1e-3, 1 - 1e-3).tolist()
            odds = [np.log(x / (1 - x)) for x in p]
            expected = [np.mean(odds[max(0, place - 2) : place + 3]) for place in places]
            assert about["credit"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("unmask_steps", [1, 2])
def test_the_figures_are_those_of_a_loop_over_completions(dataset, unmask_steps):
    policy, reference = fill_policy(scale=3.0), fill_policy(seed=2, scale=3.0).frozen()
    evaluation = evaluation_of(dataset, reference, reader(), reader(6), unmask_steps=unmask_steps, batch_size=2)
    metrics, shown = evaluation(policy, 0.7)
    batch = {key: x[:6] for key, x in evaluation.data.batch("val", 0).items()}
    c = dataclasses.replace(evaluation.config, batch_size=6, seed=evaluation.data.seed + NOISE_SEED, temperature=0.7)
    text = torch.stack(policy.sample(batch, 0, SamplingSettings.of(c)).texts.tokens).view(6, 3, -1)
    kl, entropy, right, valid, recovered, distinct = [], [], [], [], [], []
    per_problem = []  # [valid words, words]
    known = {word.lower() for word in re.findall("[A-Za-z]+", evaluation.data.train_text())}
    for i in range(6):
        hidden, truth = torch.from_numpy(batch["mask"][i]), torch.from_numpy(batch["target"][i])
        p, q = (sampling_logp(x.model(torch.from_numpy(batch["input"][i])[None])[0][hidden], 0.7)
                for x in (policy, reference))
        kl += (p.exp() * (p - q)).sum(1).tolist()
        entropy += (-(p.exp() * p).sum(1)).tolist()
        whole = TOKENIZER.decode(truth.tolist())
        earlier = len(valid)
        for completion in text[i]:
            right += (completion == truth)[hidden].tolist()
            filled = TOKENIZER.decode(completion.tolist())
            for match in re.finditer("[A-Za-z]+", whole):
                a, b = match.span()
                if a > 0 and b < len(whole) and hidden[a:b].any():
                    valid.append(filled[a:b].lower() in known)
                    recovered.append(filled[a:b] == match[0])
        per_problem.append([sum(valid[earlier:]), len(valid) - earlier])
        for a, b in words_of(whole):
            if a > 0 and b < len(whole) and hidden[a:b].any():
                distinct.append(len({tuple(completion[a:b].tolist()) for completion in text[i]}))
    score, gold = (judge(seed)(text.flatten(0, 1)).sigmoid().mean(1).view(6, 3) for seed in (5, 6))
    expected = {"kl": kl, "entropy": entropy, "token_accuracy": right, "word_validity": valid,
                "words_recovered": recovered, "distinct_words": distinct, "judge": score.tolist(),
                "gold_judge": gold.tolist(),
                "unique_completions": [len({tuple(x) for x in group.tolist()}) for group in text]}
    assert metrics == pytest.approx({name: np.mean(x) for name, x in expected.items()}, rel=1e-4)
    left = [x - count * np.mean(valid) for x, count in per_problem]
    error = np.sqrt(sum(x * x for x in left) * 6 / 5) / len(valid)
    about = shown[0]
    assert about["standard_errors"]["word_validity"] == pytest.approx(error, abs=1e-4)
    assert about["standard_errors"]["judge"] == pytest.approx(float(score.mean(1).std()) / 6**0.5, abs=1e-4)
    for i, record in enumerate(shown):
        order = score[i].argsort(descending=True).tolist()
        assert [about["text"] for about in record["group"]] == [TOKENIZER.decode(text[i, n].tolist()) for n in order]
        places = np.flatnonzero(batch["mask"][i]).tolist()
        assert record["group"][0]["filled"] == [[place, place + 1] for place in places]


def test_no_forward_reads_more_rows_than_batch_size_allows(dataset):
    """A problem is read once in the first pass, and once for each of its 4 completions in the others. The judge
    reads CHUNK texts."""
    policy, reference, scorer = fill_policy(scale=3.0), fill_policy(seed=2).frozen(), reader()
    read = [count_rows(net) for net in (policy.model, reference.model, scorer.model)]
    evaluation_of(dataset, reference, scorer, eval_problems=21, eval_completions=4, batch_size=2,
                  unmask_steps=3)(policy, 1.0)
    assert list(map(max, read)) == [8, 2, CHUNK] and sum(read[1]) == 21


def test_neither_the_estimator_nor_the_seed_of_training_changes_a_figure(dataset):
    def figures(**settings):
        c = config(dataset=dataset, eval_problems=4, unmask_steps=2, **settings)
        models = Models(FILL_IN, fill_policy(), fill_policy(seed=2), None, None)
        return fill_in_evaluation(c, models, one_process())(fill_policy(), 1.0)[0]

    assert figures() == figures(fill_estimator="one_step", seed=7)


@pytest.mark.parametrize(("names", "weights"), [
    (("judge",), ()), (("judge",), (2.0,)), (("judge", "vowels"), (3.0, -1.0)), (("vowels",), ())])
def test_the_held_out_reward_is_what_training_compares_with_a_judge_too(dataset, names, weights):
    @reward
    def vowels(completions):
        return [len(re.findall("[aeiou]", text)) / 32 if i % 5 else None for i, text in enumerate(completions)]

    c = config(task_type="general", reward_functions=names, reward_weights=weights, judge_checkpoint="j")
    models = Models(FILL_IN, None, None, reader(), reader(6))
    evaluation = evaluation_of(dataset, None, models.judge, models.gold_judge, batch_size=6)
    evaluation.rewards = make_rewards(c, models.judge)
    policy = fill_policy(scale=3.0)
    metrics, shown = evaluation(policy, 0.7)
    batch = {key: x[:6] for key, x in evaluation.data.batch("val", 0).items()}
    sampling = evaluation.config.varied(batch_size=6, seed=evaluation.data.seed + NOISE_SEED, temperature=0.7)
    texts = policy.sample(batch, 0, SamplingSettings.of(sampling)).texts
    values = {"judge": judge(5)(torch.stack(texts.tokens)).sigmoid().mean(1).tolist(),
              "vowels": vowels(texts.completions)}
    total, w = [], dict(zip(names, weights or (1.0,), strict=True))
    for n in range(18):
        terms = [w[name] * values[name][n] for name in names if values[name][n] is not None]
        total.append(sum(terms) if len(terms) == len(names) else None)
    groups = [[x for x in total[i : i + 3] if x is not None] for i in range(0, 18, 3)]
    assert metrics["mean_reward"] == pytest.approx(np.mean(sum(groups, [])), rel=1e-4)
    spread = [statistics.stdev(group) for group in groups]
    assert metrics["std_reward"] == pytest.approx(np.mean(spread), rel=1e-3)
    assert metrics["judge"] == pytest.approx(np.mean(values["judge"]), rel=1e-4)
    for i, record in enumerate(shown):
        of_group = range(3 * i, 3 * i + 3)
        order = sorted(of_group, key=lambda n: -99 if total[n] is None else total[n], reverse=True)
        for about, n in zip(record["group"], order, strict=True):
            assert about["text"] == texts.completions[n]
            expected = {name: None if values[name][n] is None else pytest.approx(values[name][n], abs=1e-4)
                        for name in names}
            assert about["rewards"] == expected
