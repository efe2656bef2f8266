"""Calls of environments: those that raise or never answer, and what they return."""

import time
from types import SimpleNamespace

import pytest

from core.settings.user_code import UserCodeError
from grpo.environments import environment
from grpo.policies.environment_calls import Played


@environment
class Waiting:
    """Waits for ever in its first step, and raises at its end."""

    def __init__(self, seed):
        pass

    def reset(self, record):
        pass

    def step(self, text):
        time.sleep(1000)

    def close(self):
        raise RuntimeError("no end")


def played(seconds=0.5):
    return Played(SimpleNamespace(environment="Waiting", environment_file=None, reward_timeout=seconds))


def test_an_environment_that_waits_or_raises_fails_with_the_line_of_its_file():
    one = played(seconds=0.05)
    assert one.begin(0, {}) is one.step("a") is None
    assert isinstance(one.error, UserCodeError) and "OutOfTime: it was not done after 0.05 seconds" in str(one.error)
    one.close()
    assert "test_environment_calls.py, line" in str(one.error) and "no end" in str(one.error)


@pytest.mark.parametrize("method, attribute, results", [
    ("reset", "reset", [5, [{"role": "user"}]]), ("step", "step", [None, ("a", "b"), ("a", float("nan"))]),
    ("metrics", "count", [3, ("a", 1)])])
def test_what_is_something_else_than_it_should_be_is_named(monkeypatch, method, attribute, results):
    monkeypatch.setattr(Waiting, "metrics", ("count",))
    monkeypatch.setattr(Waiting, "step", lambda self, text: (None, 1.0))
    for result in results:
        value = result if attribute == "count" else lambda *_, x=result: x
        monkeypatch.setattr(Waiting, attribute, value, raising=False)
        one = played()
        with pytest.raises(ValueError, match=f"^environment='Waiting': its {method} must "):
            one.begin(0, {})
            one.step("x")
            one.measure()
