"""Environments that are async, that hang, and whose results do."""

import asyncio
import sys
import threading
import time

import pytest

from core.settings.user_code import UserCodeError
from grpo.environments import environment
from grpo.policies import turns
from grpo.policies.environment_calls import Environments
from tests.grpo.policies.test_turns import episodes

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


def raising(error):
    def method(*_):
        raise error
    return method


class Text(str):
    """A text that nobody may look at."""
    __add__ = __radd__ = __len__ = __eq__ = __getitem__ = raising(AssertionError)
    __hash__ = None


class Number(float):
    __add__ = __radd__ = raising(AssertionError)


class Message(dict):
    get = __getitem__ = __eq__ = raising(AssertionError)


def test_texts_messages_and_numbers_of_other_classes_become_those_of_python(monkeypatch):
    messages = [Message(role=Text("user"), content=Text("b"), more=(1, None))]
    monkeypatch.setattr(Waiting, "metrics", ("count",))
    monkeypatch.setattr(Waiting, "count", (Number(1), True), raising=False)
    for answer, own in ((Text("a"), "a"), (messages, [{"role": "user", "content": "b", "more": [1, None]}])):
        monkeypatch.setattr(Waiting, "reset", lambda self, record, answer=answer: answer)
        monkeypatch.setattr(Waiting, "step", lambda self, text, answer=answer: (answer, Number(0.5)))
        pool = Environments("Waiting", None, 0.5)
        found = [pool.call({0: call})[0] for call in (("begin", 0, {}), ("step", "x"), ("measure",))]
        assert found == [own, (own, 0.5), {"count": (1.0, 1.0)}]
        assert type(found[1][1]) is float and type(found[0]) is type(own)


@pytest.mark.parametrize("does", [raising(KeyError), raising(RuntimeError), raising(SystemExit), lambda *_: time.sleep(3)],
                         ids=["KeyError", "RuntimeError", "exits", "hangs"])
@pytest.mark.parametrize("method", ["__iter__", "__float__", "items"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_result_that_raises_exits_or_hangs_when_it_is_looked_at_is_a_failure(monkeypatch, does, method, is_async):
    kind = type("Kind", (dict,), {method: does})
    result = {"__iter__": kind(), "__float__": (None, kind()), "items": ([kind(role="user")], 0.0)}[method]

    async def step(self, text):
        return result

    monkeypatch.setattr(Waiting, "step", step if is_async else lambda self, text: result)
    pool = Environments("Waiting", None, 0.2)
    pool.call({0: ("begin", 0, {})})
    assert isinstance(pool.call({0: ("step", "a")})[0], UserCodeError)
