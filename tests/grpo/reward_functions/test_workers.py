"""Worker processes of slow rewards: the jobs they get, and what is late. Real processes: tests/grpo/test_rewards.py."""

import pytest

from grpo.reward_functions import registry
from grpo.reward_functions.registry import Reward, load_reward_file
from grpo.reward_functions.workers import Workers
from tests.tiny import OneProcessPool


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
