"""Environments that are async, that hang, and whose results do."""

import asyncio
import sys
import threading
import time

import pytest

from core.settings.user_code import UserCodeError
from grpo.environments import environment
from grpo.policies.environment_calls import Environments

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
class Slow:
    """Answers when three of it are in their step, and never for one text."""
    slow = True
    together = threading.Barrier(3)

    def __init__(self, seed):
        pass

    async def reset(self, record):
        pass

    def step(self, text):
        if text == "never":
            threading.Event().wait()
        if text == "exit":
            sys.exit()
        self.together.wait()
        return text.upper(), 0.5


def test_slow_environments_run_in_threads_side_by_side_and_one_that_never_ends_fails_alone():
    pool = Environments("Slow", None, 5.0)
    texts = ("a", "never", "b", "exit", "c")
    pool.call({key: ("begin", 0, {}) for key in range(5)})
    found = pool.call({key: ("step", text) for key, text in enumerate(texts)})
    assert "OutOfTime" in str(found.pop(1)) and "SystemExit" in str(found.pop(3))
    assert found == {0: ("A", 0.5), 2: ("B", 0.5), 4: ("C", 0.5)}


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
