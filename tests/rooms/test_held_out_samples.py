"""Means over problems, and the samples of an evaluation: in order, in one line on a console, and in valid JSON."""

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.logger import COLORS, DIM, GREEN, PLAIN
from grpo.evaluation.samples import (
    Evaluation, append_samples, comparison_table, format_samples, histogram, last_question, room, rounded, shortened,
    standard_error)
from tests.tiny import config


class Shares(Evaluation):
    """Batches of these numbers of problems, on `world` ranks, all in this process; a judge gives the number that a
    completion is. read: the numbers of problems that were read at once"""

    def __init__(self, sizes, c, world=1):
        dist = SimpleNamespace(world=world, map=lambda function, items: [function(item) for item in items])
        super().__init__(None, None, c, dist)
        self.batches, self.read = [(0, {"number": np.arange(sum(sizes[:i]), sum(sizes[: i + 1]))})
                                   for i in range(len(sizes))], []

    def judge_scores(self, texts):
        return {"judge": torch.tensor([float(text) for text in texts.completions])}

    def sums(self, policy, step, batch, rollouts, values, config):
        self.read.append(rollouts.problems)
        return {"never": (0.0, 0.0)}


def written(batch, step, settings):
    """As if a policy wrote two completions of each problem: its number times 10, and 5 more."""
    numbers = [10 * int(i) + j for i in batch["number"] for j in (0, 5)]
    texts = SimpleNamespace(prompts=["?"] * len(numbers), completions=list(map(str, numbers)), columns={})
    target = torch.zeros(len(numbers), 1)
    return SimpleNamespace(problems=len(numbers) // 2, group_size=2, texts=texts, target=target)


def test_held_out_means_are_over_all_completions_and_samples_are_sorted():
    policy = SimpleNamespace(sample=written)
    means, samples = Shares((3, 1), config())(policy, 1.0)
    assert means == {"judge": pytest.approx(sum(10 * i + j for i in range(4) for j in (0, 5)) / 8)}
    assert [[about["text"] for about in sample["group"]] for sample in samples] == [
        ["5", "0"], ["15", "10"], ["25", "20"]], "the first three problems, from the best to the worst"
    _, samples = Shares((1, 1, 1, 1), config())(policy, 1.0)
    assert [sample["group"][0]["reward"] for sample in samples] == [5.0, 15.0, 25.0]


@pytest.mark.parametrize("world, read", [(1, [4, 2]), (2, [4, 2]), (3, [2, 2, 1, 1]), (50, [1] * 6)])
def test_fewer_batches_than_ranks_are_cut_and_neither_means_nor_samples_change(world, read):
    policy = SimpleNamespace(sample=written)
    evaluation = Shares((4, 2), config(), world)
    shown = []
    evaluation.doing = shown.append
    assert evaluation(policy, 1.0) == Shares((4, 2), config())(policy, 1.0) and evaluation.read == read
    assert [text.split()[-1] for text in shown] == [f"{i}/{len(read)}" for i in range(1, len(read) + 1)]


@pytest.mark.parametrize("completions", [(4, 4), (1, 9)])  # fewest and most of a problem
def test_a_standard_error_is_the_deviation_of_the_mean_over_other_problems(completions):
    """Problems are drawn 3,000 times, 40 each time, of different difficulty; their completions are drawn too."""
    rng = np.random.default_rng(0)
    means, errors = [], []
    for _ in range(3000):
        counts = rng.integers(completions[0], completions[1] + 1, 40)
        correct = rng.binomial(counts, rng.beta(0.4, 0.4, 40))
        means.append(correct.sum() / counts.sum())
        errors.append(float(standard_error(torch.tensor(np.stack([correct, counts], 1), dtype=torch.float64))))
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.05)
    as_if_independent = 0.5 / np.sqrt(40 * np.mean(completions))
    assert np.std(means) > 1.4 * as_if_independent


def test_the_first_sample_has_the_standard_errors_of_the_evaluation():
    policy = SimpleNamespace(sample=written)
    _, (first, *others) = Shares((3, 1), config())(policy, 1.0)
    of_problems = [10 * i + 2.5 for i in range(4)]
    assert first["standard_errors"] == {
        "judge": pytest.approx(np.std(of_problems, ddof=1) / 2, abs=1e-4)}
    assert not any("standard_errors" in sample for sample in others)
    _, (only,) = Shares((1,), config())(policy, 1.0)
    assert only["standard_errors"] == {"judge": None}


@pytest.mark.parametrize("numbers", [
    [0.5, 0.5], [3.0, 4.0, 4.0, 27.0], [math.nan, 0.25, -1.0, math.inf], [math.nan],
    [1e20, 1e20], [-1e30, 2.0**39, 2.0**39]])
def test_a_histogram_counts_every_number_that_can_be_drawn_once(numbers):
    about = strict(json.dumps(histogram(torch.tensor(numbers))))
    finite = [x for x in numbers if abs(x) < 1e12]
    width = (about["high"] - about["low"]) / len(about["counts"])
    expected = [0] * len(about["counts"])
    for x in finite:
        expected[min(int((x - about["low"]) / width), len(expected) - 1)] += 1
    assert about["counts"] == expected and sum(expected) == len(finite) and width > 0


def test_the_question_of_messages_is_the_last_one_that_is_not_the_models():
    random.seed(0)
    for _ in range(20):
        roles = [random.choice(("system", "user", "assistant")) for _ in range(5)]
        expected = ""
        for i, role in enumerate(roles):
            expected = expected if role == "assistant" else str(i)
        assert last_question([{"role": role, "content": str(i)} for i, role in enumerate(roles)]) == expected
    assert last_question("as it is") == "as it is"


def strict(text):
    """The value of a JSON text, in which NaN and Infinity are none."""
    def refuse(constant):
        raise AssertionError(constant)
    return json.loads(text, parse_constant=refuse)


def test_samples_are_valid_json_whatever_rewards_are(tmp_path):
    rewards = [rounded(torch.tensor(x)) for x in (math.nan, math.inf, -math.inf, 0.25)]
    group = [{"text": "\ud800", "reward": x, "rewards": {"a": x}, "credit": [0.5]} for x in rewards]
    for step in (1, 2):
        append_samples(tmp_path, step, [{"problem": "?", "group": group}])
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    found = [strict(line) for line in lines]
    assert [record["step"] for record in found] == [1, 2]
    for key, expected in (("reward", [None, "inf", "-inf", 0.25]), ("text", ["\ud800"] * 4)):
        assert [about[key] for about in found[1]["group"]] == expected
    assert [about["rewards"]["a"] for about in found[1]["group"]] == [None, "inf", "-inf", 0.25]


@pytest.mark.parametrize("width", [72, 80, 100, 151])
def test_a_text_is_one_line_with_both_ends_and_colours_only_what_was_sampled(width, monkeypatch):
    monkeypatch.setattr("grpo.evaluation.samples.console_width", lambda: width)
    random.seed(2)
    for length in (1, room() - 1, room(), room() + 1, 3 * room()):
        text = "".join(random.choice("ab\n") for _ in range(length))
        spans = sorted([start, min(start + 2, length)] for start in random.sample(range(length), min(length, 3)))
        line = text.replace("\n", "\u21b5")
        marked = ""
        for i, c in enumerate(line):
            marked += f"{GREEN}{c}{PLAIN}" if any(first <= i < end for first, end in spans) else c
        plain, coloured = shortened(text, spans, False), shortened(text, spans, True)
        assert coloured.replace(GREEN, "").replace(PLAIN, "") == plain and len(plain) <= room()
        if length <= room():
            assert (plain, coloured) == (line, marked)
        else:
            start, end = plain.split(" ... ")
            assert line.startswith(start) and line.endswith(end) and abs(len(start) - len(end)) <= 1
            assert len(plain) > room() - 4
        sample = {"problem": text, "group": [{"text": text, "reward": -1.2e-05, "filled": spans, "rewards": {
            "a" * n: 0.5 for n in range(1, 9)}}, {"text": "other", "reward": None}]}
        assert all(len(line) <= width for line in format_samples([sample], False, 2).splitlines())


def test_the_console_shows_the_best_and_the_worst_of_each_problem():
    group = [{"text": text, "reward": x} for text, x in (("good", 2.0), ("fair", 1.0), ("bad", None))]
    text = format_samples([{"problem": "one\ntwo", "group": group}] * 2, False, 3)
    lines = [[part.strip() for part in line.split(" | ")] for line in text.splitlines()[1:]]
    assert lines == [["problem", "one\u21b5two"], ["best     2.0000", "good"], ["worst   skipped", "bad"]] * 2


@pytest.mark.parametrize("texts, rewards, shown", [
    ("aaa", (1, 1, 1), "a"), ("aba", (1, 1, 1), "ab"), ("aab", (1, 1, 1), "ab"), ("aaa", (1, 1, 0), "aa"),
    ("a", (1,), "a"), ("aa", (None, None), "a")])
def test_equal_completions_of_a_group_are_printed_once(texts, rewards, shown):
    group = [{"text": text, "reward": x} for text, x in zip(texts, rewards, strict=True)]
    _, _, *found = format_samples([{"problem": "?", "group": group}], False, len(group)).splitlines()
    assert [line.split(" | ")[1] for line in found] == [*shown]


def test_the_console_dims_the_answers_of_an_environment():
    turns = [["\x1b[2Jone", "two\n", 0.5], ["three", [{"role": "user", "content": "four"}], 0.0], ["five", None, None]]
    group = [{"text": "a", "reward": 0.5, "turns": turns}] * 2
    plain, coloured = (format_samples([{"problem": "b", "group": group}], color, 2) for color in (False, True))
    assert plain.splitlines()[2].endswith("| \ufffd[2Jone [two\u21b5] three [four] five")
    assert COLORS.sub("", coloured) == plain
    dimmed = "".join(part[0] for part in coloured.splitlines()[2].split(DIM)[1:])
    assert dimmed == " [two\u21b5]  [four] "


def test_the_table_before_and_after_has_changes_only_of_what_was_measured_twice():
    before = {"eval/a": 0.1, "eval/b": None, "eval/c": 1.0, "eval/d": math.inf, "eval/e": 0.25}
    after = {"eval/a": 0.35, "eval/b": 2.0, "eval/d": 1.0, "eval/e": 0.249999, "eval/f": 3.0}
    head, *rows = [line.split() for line in comparison_table(before, after).splitlines()]
    assert rows == [["a", "0.1000", "0.3500", "+0.2500"], ["b", "-", "2.0000"], ["c", "1.0000", "-"],
                    ["d", "inf", "1.0000"], ["e", "0.2500", "0.2500", "+0.0000"], ["f", "-", "3.0000"]]
