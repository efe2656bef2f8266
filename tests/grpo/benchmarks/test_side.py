"""Child processes take their steps in turns."""

import time

import pytest

from grpo.benchmarks.side import Side, in_turns


def clocked_steps(name, turn):
    """Steps that report when they ran."""
    go_on = turn(None)
    while go_on:
        start = time.monotonic()
        time.sleep(0.01)
        go_on = turn((name, start, time.monotonic()))


def failing_steps(turn):
    turn(None)
    raise SystemExit(3)


@pytest.mark.slow
def test_sides_take_their_steps_one_after_another_and_a_child_that_ends_early_is_noticed():
    a, b = in_turns([(clocked_steps, "a"), (clocked_steps, "b")], steps=3)
    in_order = [record for pair in zip(a, b, strict=True) for record in pair]
    assert [name for name, *_ in in_order] == ["a", "b"] * 3
    assert all(end <= start for (*_, end), (_, start, _) in zip(in_order, in_order[1:]))
    failing = Side(failing_steps)
    for _ in range(2):  # the second time the pipe is closed
        with pytest.raises(ValueError, match="exit code 3"):
            failing.step()
