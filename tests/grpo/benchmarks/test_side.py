"""Child processes take their steps in turns."""

import os
import resource
import time

import numpy as np
import pytest

from grpo.benchmarks import side
from grpo.benchmarks.side import Side, in_turns, peak_megabytes, variables


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
    with pytest.raises(ValueError, match="exit code 3"):
        side.step()
    with pytest.raises(ValueError, match="exit code 3"):  # the pipe is closed now
        side.begin()


@pytest.mark.slow
def test_the_peak_memory_of_a_child_is_its_own():
    block = np.ones(2**27)  # 1024 MB
    assert peak_megabytes() > 1024
    del block
    [record] = in_turns({"child": Side(clocked_steps, "child")}, warmup=0, steps=1)["child"]
    assert 1 < record["megabytes"] < 1024


def test_without_proc_the_peak_is_that_of_the_resource_usage(monkeypatch):
    monkeypatch.setattr(side, "open", lambda _: open("/no/such/file"), raising=False)
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert usage <= peak_megabytes() < usage + 10


def test_environment_variables_are_as_before_afterwards(monkeypatch):
    monkeypatch.setenv("SIDE_TEST", "old")
    with variables({"SIDE_TEST": "new", "SIDE_TEST_OTHER": "x"}):
        assert (os.environ["SIDE_TEST"], os.environ["SIDE_TEST_OTHER"]) == ("new", "x")
    assert os.environ["SIDE_TEST"] == "old" and "SIDE_TEST_OTHER" not in os.environ
