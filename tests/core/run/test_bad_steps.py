"""Bad steps: what is said about them, and when they end a run."""

import re

import pytest

from core.checkpoint_manager import CheckpointManager
from core.logger import Logger
from core.run.bad_steps import BadSteps, not_finite

BAD = {"skipped_steps": 1, "loss": float("nan"), "entropy": 1.0}
GOOD = {"skipped_steps": 0, "loss": 0.5}


def bad_steps(folder, limit=3):
    return BadSteps(limit, CheckpointManager(str(folder), lambda path, **facts: None),
                    Logger(str(folder), 10, ("loss",)))


def test_what_is_not_finite_is_named():
    metrics = {"loss": float("nan"), "kl": float("-inf"), "entropy": 0.0, "nonfinite_rewards": 0.0, "skipped_steps": 1}
    assert not_finite(metrics) == ["loss", "kl"]
    assert not_finite({"nonfinite_rewards": 2.0, "skipped_steps": 1}) == ["nonfinite_rewards"]


def test_a_run_that_no_longer_trains_stops_and_names_the_last_good_state(tmp_path):
    bad = bad_steps(tmp_path)
    for step, good_before in enumerate((False, False, True, False)):
        if good_before:
            bad.in_a_row = 0
        bad.add(step, BAD)
    with pytest.raises(ValueError, match=r"3 steps in a row .*max_bad_steps=3.* the last one for loss; .* start again"):
        bad.add(5, BAD)
    (tmp_path / "state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=f"resume=True from {re.escape(str(tmp_path))}/state.pt"):
        bad.add(6, BAD)
