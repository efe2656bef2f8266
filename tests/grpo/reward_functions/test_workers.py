"""Worker processes of slow rewards: the jobs they get, and what is late."""

import ctypes
import faulthandler
import math
import multiprocessing
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from grpo.reward_functions import registry
from grpo.reward_functions import workers as workers_module
from grpo.reward_functions.registry import Reward
from grpo.reward_functions.workers import Workers
from grpo.sandbox import folder as sandbox_folder
from grpo.sandbox import processes
from tests.tiny import fork_workers


def logging_length(completions, log_metric, log_extra, scale=1):
    log_metric("jobs", os.getpid() > 0)
    log_extra("upper", [text.upper() for text in completions])
    return [scale * len(text) for text in completions]


def crash():
    faulthandler.disable()  # pytest's pages of it
    ctypes.string_at(0)


WAYS_TO_END = {"exits": lambda: os._exit(0), "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
               "crashes": crash, "SystemExit": lambda: sys.exit(3)}


def ending(completions):
    for text in completions:
        if text in WAYS_TO_END:
            WAYS_TO_END[text]()
    return [len(text) for text in completions]


def endless(completions):
    while "endless" in completions:
        pass
    return [len(text) for text in completions]


@pytest.fixture
def workers(monkeypatch):
    fork_workers(monkeypatch)
    for name, function, whole in (("alone", logging_length, False), ("whole", logging_length, True),
                                  ("ending", ending, False), ("endless", endless, False)):
        monkeypatch.setitem(registry.REWARDS, name, Reward(function, 0, 9, True, whole, None))
    made = Workers(2, 60.0, os.getpid)
    yield made
    made.close()
    assert not multiprocessing.active_children()


def called(workers, name, *completions, **settings):
    """(the values of a reward, None where skipped, the indices of those that are late)"""
    values, _, late = workers.call(name, {"completions": list(completions)}, settings, len(completions))
    return [None if math.isnan(x) else x for x in values], late


@pytest.mark.parametrize(("name", "jobs"), [("alone", 300), ("whole", 1)])
def test_values_and_logs_are_in_the_order_of_the_completions(workers, name, jobs):
    texts = [str(i) * 1000 for i in range(300)]  # more than a pipe can hold
    values, log, late = workers.call(name, {"completions": texts}, {"scale": 2}, 300)
    assert values == [2 * len(text) for text in texts] and late == set()
    assert log.metrics == {"jobs": (jobs, jobs)} and log.columns == {"upper": texts}


@pytest.mark.parametrize("way", ["exits", "is killed", "crashes"])
def test_only_the_completion_with_which_a_process_ends_is_late(workers, way):
    for _ in range(2):
        assert called(workers, "ending", "a", way, "bb", way, "ccc") == ([1, None, 2, None, 3], {1, 3})
    assert called(workers, "ending", "a", "bb") == ([1, 2], set())


def test_an_exit_of_the_reward_is_one_line_and_the_next_call_works(workers):
    with pytest.raises(ValueError, match="reward ending: SystemExit: 3$") as error:
        called(workers, "ending", "a", "SystemExit", "bb")
    assert "\n" not in str(error.value)
    assert called(workers, "ending", "a", "bb") == ([1, 2], set())


def test_processes_that_are_killed_while_they_wait_are_replaced(workers):
    called(workers, "alone", "a", "b")
    for number in (1, 2):
        for process in multiprocessing.active_children()[:number]:
            process.kill()
            process.join()
        assert called(workers, "alone", "a", "bb", "ccc") == ([1, 2, 3], set())
        assert len(multiprocessing.active_children()) == 2


def test_a_job_that_does_not_end_is_late_and_its_process_is_replaced(workers):
    called(workers, "endless", "a")
    before, workers.timeout = set(multiprocessing.active_children()), 0.2
    assert called(workers, "endless", *["endless"] * 3) == ([None] * 3, {0, 1, 2})
    assert not before & set(multiprocessing.active_children())
    workers.timeout = 60.0
    assert called(workers, "endless", "a") == ([1], set())


def test_a_process_that_does_not_read_a_large_job_is_late_and_is_replaced(workers):
    called(workers, "alone", "a", "b")
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGSTOP)
    workers.timeout = 0.2
    assert called(workers, "alone", 10**7 * "a", "b") == ([None, None], {0, 1})
    workers.timeout = 60.0
    assert called(workers, "alone", "a", "bb") == ([1, 2], set())


@pytest.fixture
def clock(monkeypatch):
    """The clock of the deadline: it stands still until a test puts it forward."""
    clock = SimpleNamespace(now=0.0)
    for module in (workers_module, processes):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_the_time_in_which_a_process_is_replaced_does_not_count(workers, clock, monkeypatch):
    start_one = workers.start_one

    def start_slowly():
        clock.now += 2 * workers.timeout
        return start_one()

    workers.start_one = start_slowly
    monkeypatch.setattr(processes, "START_SECONDS", 1000)
    assert called(workers, "ending", "exits", "is killed", "a", "bb", "ccc") == ([None, None, 1, 2, 3], {0, 1})


@pytest.mark.parametrize("ends", [False, True])
def test_an_answer_that_lies_ready_is_read_after_the_deadline_and_after_its_worker_ended(workers, clock, monkeypatch,
                                                                                         ends):
    def one_after_the_deadline(pipes, seconds):
        assert all(pipe.poll(60.0) for pipe in pipes)
        clock.now += 2 * workers.timeout
        if ends:
            list(workers.processes.values())[-1].kill()
        return pipes[:1]

    monkeypatch.setattr(workers_module, "wait", one_after_the_deadline)
    assert called(workers, "alone", "a", "bb", "ccc") == ([1, 2, None], {2})


def test_folders_of_processes_that_were_ended_are_removed(workers, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox_folder, "PLACE", [str(tmp_path)])
    (tmp_path / "left" / "below").mkdir(parents=True)
    called(workers, "ending", "a")
    assert (tmp_path / "left").exists()
    called(workers, "ending", "exits")
    assert list(tmp_path.iterdir()) == []
