"""The calculator that answers a chat model."""

import pytest

from grpo.environments import find_environment
from tests.tiny import ROOT


@pytest.fixture
def calculator():
    made = find_environment("Calculator", f"{ROOT}/data/calculator/environment.py")()
    made.reset({"answer": "391"})
    return made


@pytest.mark.parametrize(("call", "answer"), [
    ("<calc>17*23", "391"), ("Let me see: <calc> 17 * 23 ", "391"), ("<calc>17+23", "40"), ("<calc>17-23", "-6"),
    ("<calc>1<calc>2*3", "6"), ("<calc>17/23", "error"), ("<calc>17**23", "error"), ("<calc>", "error"),
    ("<calc>2*3 or so", "error"), ("<calc>9999999999*2", "error"), ("<calc>__import__('os')", "error")])
def test_calls_are_answered_with_the_number(calculator, call, answer):
    assert calculator.step(call) == (answer, 0.0) and calculator.calls == (1, 1)
