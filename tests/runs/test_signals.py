"""Signals end a run after its step; bad steps in a row end it with its last state named."""

import multiprocessing
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from core.bad_steps import BadSteps
from core.checkpoint_manager import CheckpointManager
from core.errors import Mistake
from core.logger import Logger
from core.resume import resume_command
from core.run import StopSignal
from tests.tiny import ROOT

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TWO = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
signal.signal({first}, signal.SIG_DFL)  # under nohup it is ignored
from core.run import StopSignal
from types import SimpleNamespace
with StopSignal(SimpleNamespace(is_main=True, agree=lambda number: number)) as stop:
    os.kill(os.getpid(), {first})
    print(stop.received(), flush=True)
    os.kill(os.getpid(), {second})
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ALL)
def test_a_second_signal_ends_the_process_at_once(first):
    code = TWO.format(root=ROOT, first=int(first), second=int(signal.SIGTERM))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == -signal.SIGTERM and done.stdout == f"{first.name}\n"


@pytest.fixture
def default_sigterm():
    """SIGTERM has its default action: Ray, in another test of this process, may have changed that."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def waits(ready):
    ready.set()
    time.sleep(60)


def test_a_process_that_a_reward_forks_ends_as_ever(default_sigterm):
    """A Pool ends its processes by SIGTERM and waits for them."""
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    with StopSignal(SimpleNamespace(is_main=True, world=1, agree=lambda number: number)) as stop:
        process = context.Process(target=waits, args=(ready,))
        process.start()
        ready.wait(30)
        process.terminate()
        process.join(10)
        ended = process.exitcode
        process.kill()
        assert ended == -signal.SIGTERM and stop.received() is None


def test_a_run_that_no_longer_trains_stops_and_names_the_last_good_state(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["core/pretrain.py"])
    manager = CheckpointManager(str(tmp_path), lambda path, **facts: None)
    manager.save(1, {}, [], {})
    bad = BadSteps(3, manager, Logger(str(tmp_path), 10, ("loss",)))
    metrics = {"skipped_steps": 1, "loss": float("nan"), "entropy": 1.0}
    for step, good_before in enumerate((False, False, True, False)):
        if good_before:
            bad.reset()
        bad.add_not_finite(step, metrics)
    with pytest.raises(Mistake, match="step 5.* loss.*max_bad_steps=3.*state.pt") as found:
        bad.add_not_finite(5, metrics)
    assert resume_command(str(tmp_path)) in str(found.value)
