"""Worker processes of slow rewards: the jobs they get, and what is late. Real processes: tests/grpo/test_rewards.py."""

import os
import signal
import subprocess
import sys
import time

import pytest

from grpo.reward_functions import registry, sandbox_folder
from grpo.reward_functions.registry import Reward, load_reward_file
from grpo.reward_functions.workers import Workers
from tests.tiny import ROOT, OneProcessPool


def logging_length(completions, log_metric, log_extra, scale=1):
    log_metric("length", sum(map(len, completions)))
    log_extra("upper", [text.upper() for text in completions])
    return [scale * len(text) for text in completions]


@pytest.fixture
def workers(monkeypatch):
    monkeypatch.setitem(registry.REWARDS, "alone", Reward(logging_length, 0, 9, True, False, None))
    monkeypatch.setitem(registry.REWARDS, "whole", Reward(logging_length, 0, 9, True, True, None))
    made = Workers(2, 30.0, print)
    made.pool = OneProcessPool()
    return made


@pytest.mark.parametrize(("name", "jobs"), [("alone", [["a"], ["bb"], ["ccc"]]), ("whole", [["a", "bb", "ccc"]])])
def test_values_and_logs_are_in_the_order_of_the_completions(workers, name, jobs):
    values, log, late = workers.call(name, {"completions": ["a", "bb", "ccc"]}, {"scale": 2}, 3)
    assert values == [2, 4, 6] and late == set() and workers.pool.jobs == jobs
    assert log.metrics == {"length": (6.0, len(jobs))} and log.columns == {"upper": ["A", "BB", "CCC"]}


def test_what_is_late_has_no_value_and_ends_the_processes(workers):
    pool = workers.pool
    values, log, late = workers.call("alone", {"completions": ["a", "late", "ccc"]}, {}, 3)
    assert values == [1, None, 3] and late == {1} and log.columns == {"upper": ["A", None, "CCC"]}
    assert pool.ended == 1 and workers.pool is None


def test_folders_of_processes_that_were_ended_are_removed(workers, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox_folder, "PLACE", [str(tmp_path)])
    (tmp_path / "left" / "below").mkdir(parents=True)
    workers.call("alone", {"completions": ["a"]}, {}, 1)
    assert (tmp_path / "left").exists()
    workers.call("alone", {"completions": ["late"]}, {}, 1)
    assert list(tmp_path.iterdir()) == []


def test_the_deadline_is_that_of_the_call(workers):
    workers.call("alone", {"completions": ["a", "b", "c"]}, {}, 3)
    assert 29 < workers.pool.waits[-1] <= workers.pool.waits[0] <= 30
    workers.close()
    workers.close()
    assert workers.pool is None


@pytest.mark.slow
def test_a_reward_file_that_fails_in_a_worker_alone_is_one_line_and_no_wait_for_ever(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import multiprocessing\nif multiprocessing.parent_process():\n    raise KeyError('no key here')\n")
    workers = Workers(2, 30.0, load_reward_file, str(mine))
    with pytest.raises(ValueError, match="a worker process could not start: .*mine.py, line 3: raise KeyError.*no key"):
        workers.call("alone", {"completions": ["a"]}, {}, 1)


@pytest.mark.slow
def test_a_reward_file_that_is_gone_is_one_line_and_no_wait_for_ever(tmp_path):
    for start, words in ((load_reward_file, "could not start: reward_file=.*gone.py does not exist$"),
                         (os.listdir, "could not start: .*No such file or directory.*gone.py"),
                         (sum, "a worker process could not start$")):  # a TypeError
        with pytest.raises(ValueError, match=words) as error:
            Workers(1, 30.0, start, str(tmp_path / "gone.py")).call("alone", {"completions": ["a"]}, {}, 1)
        assert "\n" not in str(error.value)


BUSY = """import os, re
from grpo.reward_functions import registry
from grpo.reward_functions.workers import Workers

def busy(completions):
    print(os.getpid(), flush=True)
    pow(10**6000, 10**200000, 10**6000 + 3)  # minutes; Python runs no other thread meanwhile

def know():
    registry.REWARDS["busy"] = registry.Reward(busy, 0, 9, True, False, None)

if __name__ == "__main__":
    know()
    Workers(1, 60.0, know).call("busy", {"completions": ["a"]}, {}, 1)
"""


@pytest.mark.slow
def test_a_worker_that_is_busy_ends_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "run.py").write_text(BUSY)
    run = subprocess.Popen([sys.executable, tmp_path / "run.py"], stdout=subprocess.PIPE, text=True,
                           env=os.environ | {"PYTHONPATH": str(ROOT)})
    pid = int(run.stdout.readline())
    run.kill()
    run.wait()
    try:
        for _ in range(500):
            os.kill(pid, 0)
            if "State:\tZ" in open(f"/proc/{pid}/status").read():  # ended, and nobody has asked for its exit code
                return
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        pytest.fail("it goes on without the run")
    except (ProcessLookupError, FileNotFoundError):
        pass
