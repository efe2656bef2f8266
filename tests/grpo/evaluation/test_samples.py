"""Samples for people: how they are shown, kept and compared."""

import json
import math

import pytest
import torch

from grpo.evaluation.samples import (append_samples, comparison_table, extra_columns, format_samples, log_sums,
                                     reward_sums, spans, under_own_names)
from grpo.reward_functions.registry import Log

FILLED = {"problem": "a_c", "truth": "abc", "best": "abc", "worst": "axc", "best_score": 0.9, "worst_score": 0.125,
          "mask": dict.fromkeys(("problem", "truth", "best", "worst"), [0, 1, 0])}
COMPLETED = {"problem": "1+1=", "answer": "2", "best": "2", "worst": "11\n", "best_score": 1.0, "worst_score": -1.0}


def test_reward_sums_leave_out_what_was_skipped():
    values = {"a": torch.tensor([1.0, math.nan, 0.5]), "b": torch.tensor([math.nan] * 3)}
    sums = {name: float(x) for name, x in reward_sums(values).items()}
    assert sums == {"reward/a": 1.5, "count of reward/a": 2, "reward/b": 0.0, "count of reward/b": 0}


def test_a_logged_metric_has_its_own_name_in_the_end_and_never_that_of_another():
    sums = log_sums(Log({"kl": (3.0, 2), "mine": (5.0, 1)}))
    assert len(sums) == 4 and not {"kl", "mine"} & set(sums)
    means = {name: sums[name] / sums[f"count of {name}"] for name in sums if f"count of {name}" in sums}
    assert under_own_names({"entropy": 0.5} | means) == {"entropy": 0.5, "kl": 1.5, "mine": 5.0}
    with pytest.raises(ValueError, match=r"log_metric\('kl', ...\): the held-out metrics have one of this name"):
        under_own_names({"kl": 0.1} | means)


def test_extra_columns_are_those_of_the_two_completions_that_are_shown():
    log = Log({}, {"answer": ["1", "2", "3"], "steps": [4, 5, 6]})
    assert extra_columns(log, 2, 0) == {"best_extra": {"answer": "3", "steps": 6},
                                        "worst_extra": {"answer": "1", "steps": 4}}
    assert extra_columns(Log(), 2, 0) == extra_columns(None, 2, 0) == {}


def test_a_column_of_anything_can_be_kept(tmp_path):
    append_samples(str(tmp_path), 3, [COMPLETED | extra_columns(Log({}, {"x": [torch.tensor(2), {"a": (1, 2)}]}), 0, 1)])
    found = json.loads((tmp_path / "samples.jsonl").read_text())
    assert found["best_extra"] == {"x": "tensor(2)"} and found["worst_extra"] == {"x": {"a": [1, 2]}}


def test_filled_characters_are_coloured_on_a_terminal_only():
    assert "\033[" in format_samples([FILLED], True) and "\033[" not in format_samples([FILLED], False)
    problem, best, worst = format_samples([FILLED], True).split("\n")
    assert "\033[" not in problem and problem.endswith("| a_c")
    assert best.endswith("a\033[1;32mb\033[0mc") and worst.endswith("a\033[1;32mx\033[0mc")


def test_a_sample_is_three_aligned_lines_with_scores():
    for record in (FILLED, COMPLETED):
        lines = format_samples([record, record], False).split("\n")
        assert len(lines) == 6 and len({line.index("|") for line in lines}) == 1
        assert [line.split()[0] for line in lines] == ["problem", "best", "worst"] * 2
    assert "0.900" in format_samples([FILLED], False) and "-1.000" in format_samples([COMPLETED], False)
    assert "11\u21b5" in format_samples([COMPLETED], False), "a text is one line"


def test_samples_are_added_to_a_file_with_the_places_that_were_filled_in(tmp_path):
    append_samples(str(tmp_path), 3, [FILLED])
    append_samples(str(tmp_path), 6, [COMPLETED, COMPLETED])
    found = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [record["step"] for record in found] == [3, 6, 6]
    kept = {key: x for key, x in FILLED.items() if key != "mask"}
    assert found[0] == {"step": 3, "filled": dict.fromkeys(FILLED["mask"], [[1, 2]])} | kept
    assert found[1] == {"step": 6} | COMPLETED


def test_spans_are_the_stretches_of_a_mask():
    assert spans([]) == spans([0, 0]) == [] and spans([1]) == [[0, 1]] and spans([True] * 3) == [[0, 3]]
    for number in range(2**8):
        mask = [int(digit) for digit in f"{number:08b}"]
        found = spans(mask)
        assert [int(any(a <= i < b for a, b in found)) for i in range(8)] == mask
        assert all(a < b for a, b in found) and all(b < c for (_, b), (c, _) in zip(found, found[1:]))


def test_the_comparison_has_a_line_for_each_metric_of_both_evaluations():
    before, after = {"eval/kl": 0.0, "eval/judge": 0.5, "eval/gone": 1.0}, {"eval/judge": 0.75, "eval/kl": 0.1}
    table = comparison_table(before, after)
    head, *lines = table.split("\n")
    assert head.split() == ["held-out", "before", "after", "change"]
    assert [line.split()[0] for line in lines] == ["kl", "judge"]
    assert [float(x) for x in lines[1].split()[1:]] == pytest.approx([0.5, 0.75, 0.25]) and "+0.2500" in lines[1]
