"""Child processes take their steps in turns."""

import os
import time

import pytest

from grpo.benchmarks.side import Side, in_turns, variables


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
def test_sides_take_their_steps_one_after_another():
    sides = {"a": Side(clocked_steps, "a", SIDE_TEST="1"), "b": Side(clocked_steps, "b")}
    records = in_turns(sides, warmup=1, steps=3)
    every = sorted((r for found in records.values() for r in found), key=lambda r: r["start"])
    assert [r["name"] for r in every] == list("ababab")
    assert all(one["end"] <= two["start"] for one, two in zip(every, every[1:]))
    assert {r["variable"] for r in records["a"]} == {"1"} and {r["variable"] for r in records["b"]} == {None}
    assert all(r["megabytes"] > 1 for r in every)
    assert not any(side.process.is_alive() for side in sides.values())


@pytest.mark.slow
def test_a_child_that_ends_early_is_noticed():
    side = Side(failing_steps)
    assert side.wait() is None
    with pytest.raises(RuntimeError, match="exit code 3"):
        side.step()


def test_environment_variables_are_as_before_afterwards(monkeypatch):
    monkeypatch.setenv("SIDE_TEST", "old")
    with variables({"SIDE_TEST": "new", "SIDE_TEST_OTHER": "x"}):
        assert (os.environ["SIDE_TEST"], os.environ["SIDE_TEST_OTHER"]) == ("new", "x")
    assert os.environ["SIDE_TEST"] == "old" and "SIDE_TEST_OTHER" not in os.environ
