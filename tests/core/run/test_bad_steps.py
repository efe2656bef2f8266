"""Bad steps: what is written about them, how much is kept, and when they end a run."""

import os
import re

import pytest
import torch

from core.checkpoint_manager import CheckpointManager
from core.logger import Logger
from core.run.bad_steps import BadSteps, not_finite
from core.run.folder import set_aside

BAD = {"skipped_steps": 1, "loss": float("nan"), "entropy": 1.0}
GOOD = {"skipped_steps": 0, "loss": 0.5}


def bad_steps(folder, limit=3, rank=0):
    return BadSteps(limit, CheckpointManager(str(folder), lambda path, **facts: None),
                    Logger(str(folder), 10, ("loss",), silent=rank > 0), rank)


def names(*steps, rank=0):
    return [f"step-{step:06d}-rank-{rank}.pt" for step in steps]


def test_what_is_not_finite_is_named():
    metrics = {"loss": float("nan"), "kl": float("-inf"), "entropy": 0.0, "nonfinite_rewards": 0.0, "skipped_steps": 1}
    assert not_finite(metrics) == ["loss", "kl"]
    assert not_finite({"nonfinite_rewards": 2.0, "skipped_steps": 1}) == ["nonfinite_rewards"]


def test_a_run_that_no_longer_trains_stops_and_names_the_last_good_state(tmp_path):
    bad = bad_steps(tmp_path)
    for step, metrics in enumerate((BAD, BAD, GOOD, BAD, BAD)):
        bad.check(step, metrics, dict)
    with pytest.raises(ValueError, match=r"3 steps in a row .*max_bad_steps=3.* the last one loss; .* start again"):
        bad.check(5, BAD, dict)
    (tmp_path / "state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=f"resume=True from {re.escape(str(tmp_path))}/state.pt"):
        bad.check(6, BAD, dict)


def test_the_batch_of_a_bad_step_is_made_and_written_and_set_aside_with_its_run(tmp_path, capsys):
    made, x = [], torch.arange(3.0)
    bad = bad_steps(tmp_path, rank=1)
    for step, metrics in ((11, GOOD), (12, BAD), (13, GOOD)):
        bad.check(step, metrics, lambda step=step: made.append(step) or {"x": x, "texts": ["a\ud800"], "none": None})
    assert made == [12] and os.listdir(tmp_path / "bad_steps") == names(12, rank=1)
    found = torch.load(tmp_path / "bad_steps" / names(12, rank=1)[0], weights_only=True)
    assert torch.equal(found.pop("x"), x) and found == {"step": 12, "rank": 1, "not_finite": ["loss"],
                                                        "texts": ["a\ud800"], "none": None}
    assert capsys.readouterr().out == "", "rank 0 alone tells"
    bad_steps(tmp_path).check(12, BAD, dict)
    assert "step 12 is skipped, because these are not finite: loss; its batch is in" in capsys.readouterr().out
    assert sorted(os.listdir(os.path.join(set_aside(str(tmp_path)), "bad_steps"))) == [*names(12), *names(12, rank=1)]
    assert not (tmp_path / "bad_steps").exists()


@pytest.mark.parametrize("limit, steps, kept", [
    (3, (7, 8, 999_999, 1_000_000, 1_000_001), (999_999, 1_000_000, 1_000_001)),
    (10**6, range(1, 24), range(4, 24))], ids=["limit", "most files"])
def test_each_rank_keeps_its_last_files_and_never_many(tmp_path, limit, steps, kept):
    for rank in (0, 1):
        bad = bad_steps(tmp_path, limit, rank)
        for step in steps:
            bad.check(step, BAD, dict)
            bad.check(step, GOOD, dict)
    assert sorted(os.listdir(tmp_path / "bad_steps")) == sorted(names(*kept) + names(*kept, rank=1))
