"""Samples for people: how they are shown, kept and compared."""

import json
import math
from types import SimpleNamespace

import torch

from grpo.evaluation.samples import append_samples, best_and_worst
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


def test_samples_are_added_to_a_file(tmp_path):
    extra = {"best_extra": {"x": torch.tensor(2)}, "worst_extra": {"x": (1, 2)}}  # a column of anything can be kept
    append_samples(str(tmp_path), 3, [FILLED])
    append_samples(str(tmp_path), 6, [COMPLETED, COMPLETED | extra])
    found = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert found == [{"step": 3} | FILLED, {"step": 6} | COMPLETED,
                     {"step": 6} | COMPLETED | {"best_extra": {"x": "tensor(2)"}, "worst_extra": {"x": [1, 2]}}]
