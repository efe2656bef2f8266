"""The loop of both trainers, signals that end it, bad steps."""

import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from core.checkpoint_manager import CheckpointManager
from core.logger import Logger
from core.optim import not_finite
from core.run import BadSteps, StopSignal
from tests.tiny import ROOT, one_process


ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def handlers():
    return [signal.getsignal(number) for number in ALL]


@pytest.mark.parametrize("number", ALL)
def test_a_signal_is_noted_and_the_handlers_are_as_before_after_the_block(number, capfd):
    before = handlers()
    with StopSignal(one_process()) as stop:
        assert stop.came() is None
        os.kill(os.getpid(), number)
        assert stop.came() == stop.came() == signal.Signals(number).name
        assert handlers() == [signal.SIG_DFL] * 3, "a second one ends the process"
    assert handlers() == before
    assert "ends after this step" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # as a shell and nohup ask for
def test_a_signal_that_is_ignored_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignal(one_process()) as stop:
            os.kill(os.getpid(), number)
            assert stop.came() is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_rank_that_fails_is_not_ended_by_a_signal_before_it_has_told():
    before = handlers()
    try:
        with pytest.raises(ValueError), StopSignal(SimpleNamespace(is_main=False, world=2)) as stop:
            raise ValueError
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number == signal.SIGTERM
    finally:
        for number, handler in zip(ALL, before, strict=True):
            signal.signal(number, handler)


TWO = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from core.run import StopSignal
from types import SimpleNamespace
with StopSignal(SimpleNamespace(is_main=True, agree=lambda number: number)) as stop:
    os.kill(os.getpid(), {first})
    print(stop.came(), flush=True)
    os.kill(os.getpid(), {second})
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [ALL[:2], ALL[1:]])
def test_a_second_signal_ends_the_process_at_once(first, second):
    code = TWO.format(root=ROOT, first=int(first), second=int(second))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == -second and done.stdout == f"{first.name}\n" and "Traceback" not in done.stderr


BAD = {"skipped_steps": 1, "loss": float("nan"), "entropy": 1.0}


def bad_steps(folder, limit=3):
    return BadSteps(limit, CheckpointManager(str(folder), lambda path, **facts: None),
                    Logger(str(folder), 10, ("loss",)))


def test_what_is_not_finite_is_named():
    metrics = {"loss": float("nan"), "kl": float("-inf"), "entropy": 0.0, "skipped_steps": 1}
    assert not_finite(metrics) == ["loss", "kl"]


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
