"""Signals that end a run after its step."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from core.stop_signal import StopSignal
from tests.tiny import ROOT, one_process

BOTH = (signal.SIGTERM, signal.SIGINT)


def handlers():
    return [signal.getsignal(number) for number in BOTH]


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_is_noted_and_the_handlers_are_as_before_after_the_block(number, capfd):
    before = handlers()
    with StopSignal(one_process()) as stop:
        assert stop.came() is None
        os.kill(os.getpid(), number)
        assert stop.came() == stop.came() == signal.Signals(number).name
        assert handlers() == [signal.SIG_DFL] * 2, "a second one ends the process"
    assert handlers() == before
    assert "ends after this step" in capfd.readouterr().err


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignal(one_process()) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.came() is None
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_thread_that_may_not_set_handlers_runs_without_them():
    found = []

    def run():
        with StopSignal(one_process()) as stop:
            found.append(stop.came())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [None]


TWO = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from types import SimpleNamespace
from core.stop_signal import StopSignal
with StopSignal(SimpleNamespace(is_main=True, agree=lambda number: number)) as stop:
    os.kill(os.getpid(), {first})
    print(stop.came(), flush=True)
    os.kill(os.getpid(), {second})
    time.sleep(60)
"""


@pytest.mark.parametrize("first, second", [BOTH, BOTH[::-1], (signal.SIGTERM, signal.SIGTERM)])
def test_a_second_signal_ends_the_process_at_once(first, second):
    code = TWO.format(root=ROOT, first=int(first), second=int(second))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == -second and done.stdout == f"{first.name}\n" and "Traceback" not in done.stderr
