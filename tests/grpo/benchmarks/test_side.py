"""Child processes take their steps in turns."""

import os
import time

import pytest

from grpo.benchmarks.side import Side, in_turns


def clocked_steps(name, turn):
    """Steps that report when they ran, and an environment variable."""
    go_on = turn(None)
    while go_on:
        start = time.monotonic()
        time.sleep(0.01)
        go_on = turn({"name": name, "start": start, "end": time.monotonic(), "variable": os.environ.get("SIDE_TEST")})


def failing_steps(turn):
    turn(None)
    raise SystemExit(3)


@pytest.mark.slow
def test_teams_take_their_steps_one_after_another_and_a_child_that_ends_early_is_noticed():
    teams = {"a": [Side(clocked_steps, "a", SIDE_TEST="1")], "b": [Side(clocked_steps, "b"), Side(clocked_steps, "c")]}
    failing = Side(failing_steps)
    assert "SIDE_TEST" not in os.environ
    records = in_turns(teams, warmup=1, steps=3)
    rounds = [turns for pair in zip(*records.values(), strict=True) for turns in pair]
    assert [[(r["name"], r["variable"]) for r in turns] for turns in rounds] == [
        [("a", "1")], [("b", None), ("c", None)]] * 3
    for one, two in zip(rounds, rounds[1:]):
        assert max(r["end"] for r in one) <= min(r["start"] for r in two)
    assert failing.wait() is None
    for _ in range(2):  # the second time the pipe is closed
        failing.send(True)
        with pytest.raises(ValueError, match="exit code 3"):
            failing.wait()
