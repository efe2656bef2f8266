"""Samples for people: how they are shown, kept and compared."""

import json
import math
from types import SimpleNamespace

import torch

from core.logger import WIDTH
from grpo.evaluation.samples import append_samples, best_and_worst, comparison_table, format_samples, turn_by_turn
from grpo.reward_functions.registry import Log

FILLED = {"problem": "a_c", "truth": "abc", "best": "abc", "worst": "axc", "best_score": 0.9, "worst_score": 0.125,
          "filled": dict.fromkeys(("problem", "truth", "best", "worst"), [[1, 2]])}
COMPLETED = {"problem": "1+1=", "answer": "2", "best": "2", "worst": "11\n", "best_score": 1.0, "worst_score": -1.0}


class Rewards:
    """Completion 1 is correct, 2 was skipped, all others are wrong."""
    success = "a"

    def right(self, values):
        return torch.tensor([0.0, 1.0, math.nan, *[0.0] * 5])


def test_a_sample_is_the_best_and_the_worst_completion_of_a_problem_with_what_is_known_about_them():
    total = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.0, math.nan, 5.0, 6.0])              # (N,)
    texts = SimpleNamespace(prompts=list("ppqqrrss"), completions=list("abcdefgh"), columns={"answer": [7] * 8})
    rollouts = SimpleNamespace(texts=texts, group_size=2)
    found = best_and_worst(None, rollouts, total, Rewards(), {"a": total}, Log({}, {"x": list("01234567")}))
    assert [numbers for _, numbers in found] == [
        {"best": first, "worst": worst, "1 of 2": first, "2 of 2": second}
        for first, worst, second in ((1, 0, 0), (2, 3, 3), (4, 4, 5))], "of the first problems"
    assert found[0][0] == {
        "problem": "p", "answer": 7, "best": "b", "best_score": 2.0, "best_right": True, "best_extra": {"x": "1"},
        "worst": "a", "worst_score": 0.0, "worst_right": False, "worst_extra": {"x": "0"},
        "1 of 2": "b", "1 of 2_score": 2.0, "1 of 2_right": True,
        "2 of 2": "a", "2 of 2_score": 0.0, "2 of 2_right": False, "group": ["1 of 2", "2 of 2"]}
    assert "best_right" not in found[1][0] and found[1][0]["worst_right"] is False
    texts.columns = {"prompt": ["p", "p", [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "q"]}
    assert [record["problem"] for record, _ in best_and_worst(None, rollouts, total[:4], None, {}, None)] == ["p", "u"]
    texts.columns = {}
    for rewards, log in ((None, None), (Rewards(), Log())):
        record, _ = best_and_worst(None, rollouts, total, rewards, {}, log)[1]
        assert {"problem": "q", "best": "c", "best_score": 1.0, "worst": "d", "worst_score": -1.0}.items() <= record.items()
        assert not any(key.endswith(("right", "extra")) for key in record)


def test_a_sample_is_three_aligned_lines_with_scores_and_on_a_terminal_coloured_characters():
    for record, score in ((FILLED, "0.9000"), (COMPLETED, "-1.0000")):
        head, *lines = format_samples([record, record], False, 4).split("\n")
        assert head == "  best and worst of 4 completions, by reward"
        assert len(lines) == 6 and len({line.index("|") for line in lines}) == 1
        assert [line.split()[0] for line in lines] == ["problem", "best", "worst"] * 2
        assert any(score in line for line in lines) and not any("\033[" in line for line in lines)
    assert lines[-1].endswith("11\u21b5"), "a text is one line"
    _, problem, best, worst = format_samples([FILLED], True, 4).split("\n")
    assert problem.endswith("| a_c")
    assert best.endswith("a\033[1;32mb\033[0mc") and worst.endswith("a\033[1;32mx\033[0mc")


def test_equal_rewards_are_shown_once_and_of_a_long_text_the_ends():
    equal = COMPLETED | {"best_score": -1.0}
    assert [line.split()[0] for line in format_samples([equal], False, 4).split("\n")[1:]] == ["problem", "equal"]
    long = "".join(chr(ord("a") + i % 26) for i in range(999)) + "!"
    record = {"problem": long, "best": long, "worst": long, "best_score": 1.0, "worst_score": 0.0,
              "filled": dict.fromkeys(("best", "worst"), [[0, 1], [999, 1000]])}
    for line in format_samples([record], False, 4).split("\n"):
        assert len(line) <= WIDTH and ("abc" in line) == ("!" in line)
    best = format_samples([record], True, 4).split("\n")[2]
    assert "\033[1;32ma\033[0m" in best and "\033[1;32m!\033[0m" in best, "what was filled in stays coloured"


class Letters:
    """Token 1 is "a", 2 is "b", ..., 0 the end of a line."""

    def decode(self, ids):
        return "".join("\nabcdefgh"[token] for token in ids)


def test_of_a_completion_of_several_turns_what_another_wrote_stands_on_lines_of_its_own():
    ids = [[5, 6, 7, 8, 0, 1], [5, 6], [5, 6, 7]]
    mask = torch.tensor([[1.0, 1, 0, 0, 0, 1], [1, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]])
    rollouts = SimpleNamespace(mask=mask, texts=SimpleNamespace(completion_ids=ids))
    found = [turn_by_turn(Letters(), rollouts, n) for n in range(3)]
    assert found == ["ef\n> gh\na", "ef", "> e\nf\n> g"], "what follows is padding"


def test_samples_are_added_to_a_file(tmp_path):
    extra = {"best_extra": {"x": torch.tensor(2)}, "worst_extra": {"x": (1, 2)}}  # a column of anything can be kept
    append_samples(str(tmp_path), 3, [FILLED])
    append_samples(str(tmp_path), 6, [COMPLETED, COMPLETED | extra])
    found = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert found == [{"step": 3} | FILLED, {"step": 6} | COMPLETED,
                     {"step": 6} | COMPLETED | {"best_extra": {"x": "tensor(2)"}, "worst_extra": {"x": [1, 2]}}]


def test_the_comparison_has_a_line_for_each_metric_and_a_dash_for_what_was_not_measured():
    long = "reward/correctness_of_the_answer"
    before = {"eval/kl": 0.0, "eval/judge": 0.5, f"eval/{long}": 1.0, "eval/large": 0.0}
    after = {"eval/judge": 0.75, "eval/kl": 0.1, "eval/new": None, "eval/large": 3.4028234663852886e38}
    table = comparison_table(before, after).split("\n")
    assert len({len(line) for line in table[:2]}) == 1, "columns stay under their titles"
    head, *lines = [line.split() for line in table]
    assert head == ["held-out", "before", "after", "change"]
    assert lines == [["kl", "0.0000", "0.1000", "+0.1000"], ["judge", "0.5000", "0.7500", "+0.2500"],
                     [long, "1.0000", "-"], ["large", "0.0000", "3.4e+38", "+3.4e+38"], ["new", "-", "-"]]
