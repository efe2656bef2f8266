"""Worker processes of slow rewards: the completions they get, what is late, and that they end with the run."""

import math
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from core.errors import Mistake
from grpo.reward_functions import registry
from grpo.reward_functions.registry import Call, Reward
from grpo.reward_functions.workers import Workers
from tests.tiny import ROOT, fork_workers


def length(completions, log_metric, scale=1):
    text, = completions
    log_metric("jobs", 1)
    WAYS_TO_END.get(text, int)()
    return [scale * len(text)]


def endless():
    while True:
        pass


WAYS_TO_END = {"exits": lambda: os._exit(0), "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
               "endless": endless, "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP), "raises": lambda: 1 / 0}


@pytest.fixture
def workers(monkeypatch):
    fork_workers(monkeypatch)
    monkeypatch.setitem(registry.REWARDS, "length", Reward(length))
    made = Workers(2, 60.0)
    yield made
    made.close()
    assert not multiprocessing.active_children()


def called(workers, *completions, **settings):
    """(the values of a reward, None where skipped or late, and its metrics)"""
    values, metrics = workers.call(Call("length", {"completions": list(completions)}, settings, len(completions)))
    return [None if math.isnan(x) else x for x in values], metrics


def test_values_are_in_the_order_of_the_completions_and_metrics_are_added(workers):
    texts = [str(i) * 1000 for i in range(100)]  # more than a pipe can hold
    assert called(workers, *texts, scale=2) == ([2 * len(text) for text in texts], {"jobs": (100, 100)})


@pytest.mark.parametrize("way", [
    "exits", "is killed", *(pytest.param(way, marks=pytest.mark.slow) for way in ("endless", "stops"))])
def test_a_completion_that_does_not_end_is_late_and_the_processes_and_their_files_are_replaced(workers, way):
    called(workers, "a")
    folder = pathlib.Path(workers.folder.name)
    (folder / "left" / "below").mkdir(parents=True)
    workers.timeout = 1.0
    assert called(workers, way, "a")[0][0] is None and not folder.exists()
    workers.timeout = 60.0
    assert called(workers, "a", "bb")[0] == [1, 2]


def test_an_error_of_the_reward_is_the_runs(workers):
    with pytest.raises(Mistake, match="test_reward_workers.py, line .*reward length .*ZeroDivisionError"):
        called(workers, "a", "raises", "endless")
    assert called(workers, "a", "bb")[0] == [1, 2]


WAITING = """import os, time
from grpo.reward_functions.registry import Call, reward
from grpo.reward_functions.workers import Workers

@reward
def waiting(completions):
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    Workers(1, 600.0).call(Call("waiting", {"completions": [""]}, {}, 1))
"""


@pytest.mark.slow
def test_a_worker_ends_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "run.py").write_text(WAITING)
    run = subprocess.Popen([sys.executable, tmp_path / "run.py"], stdout=subprocess.PIPE, text=True,
                           env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)})
    pid = int(run.stdout.readline())
    run.kill()
    run.wait()
    for _ in range(500):
        status = pathlib.Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():  # ended, and nobody has asked for its exit code
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("it goes on without the run")
