"""Calls of environments: async ones, those that never answer, and what they return."""

import asyncio
import time

import pytest

from core.settings.user_code import UserCodeError
from grpo.environments import environment
from grpo.policies.environment_calls import Environments


@environment
class Waiting:
    """Answers after a while, or never."""
    inside = most = 0  # in their step at the same time

    def __init__(self, seed):
        pass

    async def reset(self, record):
        self.never = record.get("never")

    async def step(self, text):
        Waiting.inside += 1
        Waiting.most = max(Waiting.most, Waiting.inside)
        await asyncio.sleep(1000 if self.never else 0.05)
        Waiting.inside -= 1
        return text.upper(), 0.5

    async def close(self):
        raise RuntimeError("no end")


def test_async_environments_answer_side_by_side_and_those_that_wait_for_ever_fail():
    pool = Environments("Waiting", None, 0.5)
    begun = pool.call({key: ("begin", 0, {"never": key == 3}) for key in range(8)})
    assert begun == dict.fromkeys(range(8))
    found = pool.call({key: ("step", "abc"[key % 3]) for key in range(8)})
    assert Waiting.most == 8
    assert "TimeoutError" in str(found.pop(3))
    assert found == {key: ("ABC"[key % 3], 0.5) for key in range(8) if key != 3}
    assert "test_environment_calls.py, line" in (error := str(pool.call({0: ("close",)})[0])) and "no end" in error


def test_an_environment_that_waits_without_async_fails_after_its_time(monkeypatch):
    monkeypatch.setattr(Waiting, "step", lambda self, text: time.sleep(1000))
    pool = Environments("Waiting", None, 0.05)
    pool.call({0: ("begin", 0, {})})
    error = pool.call({0: ("step", "a")})[0]
    assert isinstance(error, UserCodeError) and "OutOfTime: it was not done after 0.05 seconds" in str(error)


@pytest.mark.parametrize("method, attribute, results", [
    ("reset", "reset", [5, [{"role": "user"}]]), ("step", "step", [None, ("a", "b"), ("a", float("nan"))]),
    ("metrics", "count", [3, ("a", 1)])])
def test_what_is_something_else_than_it_should_be_is_named(monkeypatch, method, attribute, results):
    monkeypatch.setattr(Waiting, "metrics", ("count",))
    monkeypatch.setattr(Waiting, "count", (1, 1), raising=False)
    monkeypatch.setattr(Waiting, "reset", lambda self, record: None)
    for result in results:
        monkeypatch.setattr(Waiting, attribute, result if attribute == "count" else lambda *_, x=result: x)
        pool = Environments("Waiting", None, 0.5)
        with pytest.raises(ValueError, match=f"^environment='Waiting': its {method} must "):
            for call in (("begin", 0, {}), ("step", "x"), ("measure",)):
                pool.call({0: call})
