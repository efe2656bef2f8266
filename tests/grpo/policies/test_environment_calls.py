"""Environments that are async, that hang, and that end their process."""

import asyncio
import gc
import multiprocessing
import sys
import time

import pytest

from core.settings.user_code import UserCodeError
from grpo.environments import environment
from grpo.policies import environment_calls, turns
from grpo.policies.environment_calls import Environments, RemoteEnvironments
from tests.grpo.policies.test_turns import episodes

IN_PROCESSES = """
import os, signal, time
from grpo.environments import environment

@environment
class Careless:
    '''Does what the record says.'''
    slow = True
    metrics = ("calls",)

    def __init__(self, seed):
        self.seed, self.steps = seed, 0

    def reset(self, record):
        self.what = record["what"]
        return record.get("opening")

    def step(self, text):
        self.steps += 1
        if self.what == "sleep":
            time.sleep(1000)
        if self.what == "hang":  # and hears no signal, as some code in C
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(1000)
        if self.what == "kill":
            os.kill(os.getpid(), 9)
        if self.what == "exit":
            os._exit(0)
        if self.what == "wait":
            time.sleep(0.4)
        if self.what == "object":
            return iter(()), 0.0
        if self.what == "raise":
            raise KeyError("no answer")
        if self.what == "flood":
            return 10**7 * "flood ", 0.0
        return f"{text}{self.seed}{os.getpid()}", 1.0

    @property
    def calls(self):
        return self.steps, 1
"""


@pytest.fixture
def careless(tmp_path):
    path = tmp_path / "careless.py"
    path.write_text(IN_PROCESSES)
    return str(path)


def start(pool, kinds):
    """Begins one environment of each kind."""
    begun = pool.call({key: ("begin", key, {"what": kind}) for key, kind in enumerate(kinds)})
    assert begun == dict.fromkeys(range(len(kinds)))


@pytest.mark.slow
def test_an_environment_that_ends_or_holds_its_process_fails_alone_with_those_beside_it(careless):
    pool = RemoteEnvironments("Careless", careless, 1.0, 3)
    for kind, said in (("kill", "has ended"), ("exit", "has ended"), ("hang", "OutOfTime: it was not done after 1.0")):
        start(pool, [kind, "well", "well", "well"])  # 0 and 3 share a process
        found = pool.call({key: ("step", "a") for key in range(4)})
        for key in (0, 3):
            assert isinstance(found[key], UserCodeError) and said in str(found[key]), kind
        assert [found[key][1] for key in (1, 2)] == [1.0, 1.0]
        assert len({found[key][0] for key in (1, 2)}) == 2
        again = pool.call({key: ("step", "b") for key in range(4)})
        assert [isinstance(again[key], UserCodeError) for key in range(4)] == [True, False, False, True]
        pool.call({key: ("close",) for key in range(4)})
    assert not pool.home
    pool.workers.close()


@pytest.mark.slow
def test_an_environment_that_waits_or_raises_in_a_process_fails_alone(careless):
    pool = RemoteEnvironments("Careless", careless, 0.5, 1)
    start(pool, ["sleep", "raise", "well"])
    found = pool.call({key: ("step", "a") for key in range(3)})
    assert "time.sleep(1000): OutOfTime: it was not done after 0.5 seconds" in str(found[0])
    assert 'careless.py, line ' in str(found[1]) and "KeyError: 'no answer'" in str(found[1])
    assert found[2][1] == 1.0
    assert pool.call({2: ("measure",)}) == {2: {"calls": (1, 1)}}
    pool.workers.close()


@pytest.mark.slow
def test_the_time_of_a_call_is_its_own_and_an_interrupted_call_leaves_no_answers(careless, monkeypatch):
    pool = RemoteEnvironments("Careless", careless, 1.0, 1)
    start(pool, ["wait"] * 20)  # longer than the time of one call, and the seconds that are added
    found = pool.call({key: ("step", "a") for key in range(20)})
    assert all(found[key][1] == 1.0 for key in range(20))

    def interrupted(pipes, seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environment_calls, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.call({0: ("step", "a")})
    pool.call({key: ("close",) for key in range(20)})
    start(pool, ["", "object"])
    assert pool.call({0: ("step", "b")})[0][0].startswith("b0")
    with pytest.raises(ValueError, match="^the step of an environment must return .a text, messages or None, a finite"):
        pool.call({1: ("step", "b")})
    pool.workers.close()


@pytest.mark.slow
def test_a_run_with_environments_in_processes_is_that_with_environments_in_its_own(careless, prompts, monkeypatch, capfd):
    monkeypatch.setattr(turns, "WARNED", set())
    text = IN_PROCESSES.replace('record["what"]', '("", "flood", "raise")[int(record["prompt"][0]) % 3]')
    with open(careless, "w") as f:
        f.write(text.replace("{os.getpid()}", ""))
    found = []
    for workers in (0, 2):
        settings = {"environment": "Careless", "environment_file": careless, "reward_workers": workers, "batch_size": 16}
        found.append(episodes(prompts, **settings)[-1].texts)
    assert found[0].completion_ids == found[1].completion_ids and found[0].columns == found[1].columns
    assert found[0].metrics == found[1].metrics
    rewards = found[0].columns["environment_reward"]
    assert None in rewards and max(x for x in rewards if x is not None) > 1
    gc.collect()
    for process in multiprocessing.active_children():
        process.join(30)
    assert not multiprocessing.active_children(), "they end with the policy"


class Counter:
    """Counts what is inside of it at the same time."""
    inside = most = 0

    async def __aenter__(self):
        self.inside += 1
        self.most = max(self.most, self.inside)

    async def __aexit__(self, *_):
        self.inside -= 1


COUNTER = Counter()


@environment
class Waiting:
    """Answers after a while, or never."""

    def __init__(self, seed):
        pass

    async def reset(self, record):
        self.never = record.get("never")

    async def step(self, text):
        async with COUNTER:
            await asyncio.sleep(1000 if self.never else 0.05)
        return text.upper(), 0.5

    async def close(self):
        raise RuntimeError("no end")


def test_async_environments_answer_side_by_side_and_those_that_wait_for_ever_fail():
    COUNTER.most = 0
    pool = Environments("Waiting", None, 0.5)
    begun = pool.call({key: ("begin", 0, {"never": key == 3}) for key in range(8)})
    assert begun == dict.fromkeys(range(8))
    found = pool.call({key: ("step", "abc"[key % 3]) for key in range(8)})
    assert COUNTER.most == 8
    assert "OutOfTime: it was not done after 0.5 seconds" in str(found.pop(3))
    assert found == {key: ("ABC"[key % 3], 0.5) for key in range(8) if key != 3}
    assert "RuntimeError: no end" in str(pool.call({0: ("close",)})[0])


@pytest.mark.parametrize("holds_up", [lambda: time.sleep(3), lambda: sys.exit(1)], ids=["sleeps", "exits"])
def test_a_coroutine_that_holds_up_the_event_loop_or_exits_fails_and_the_next_ones_run(monkeypatch, holds_up):
    async def step(self, text):
        if self.never:
            holds_up()
        return text, 1.0

    monkeypatch.setattr(Waiting, "step", step)
    pool = Environments("Waiting", None, 0.2)
    pool.call({key: ("begin", 0, {"never": key == 0}) for key in range(3)})
    failed = pool.call({0: ("step", "a")})[0]
    assert isinstance(failed, UserCodeError) and ("SystemExit" in str(failed) or "OutOfTime: it was not" in str(failed))
    assert pool.call({key: ("step", "a") for key in (1, 2)}) == {1: ("a", 1.0), 2: ("a", 1.0)}


def test_a_timeout_of_the_users_own_keeps_its_line(monkeypatch):
    async def step(self, text):
        raise TimeoutError("no answer from the server")

    monkeypatch.setattr(Waiting, "step", step)
    pool = Environments("Waiting", None, 5.0)
    pool.call({0: ("begin", 0, {})})
    error = str(pool.call({0: ("step", "a")})[0])
    assert "test_environment_calls.py, line" in error and "TimeoutError: no answer from the server" in error


def test_an_environment_that_waits_without_async_fails_after_its_time(prompts, monkeypatch, capfd):
    def waits(self, text):
        time.sleep(1000)

    monkeypatch.setattr(turns, "WARNED", set())
    monkeypatch.setattr(Waiting, "step", waits)
    _, _, _, rollouts = episodes(prompts, environment="Waiting", reward_timeout=0.05, batch_size=1, group_size=2)
    assert rollouts.texts.columns["environment_reward"] == [None, None]
    assert "time.sleep(1000): OutOfTime: it was not done after 0.05 seconds" in capfd.readouterr().err
