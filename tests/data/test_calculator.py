"""The calculator that answers a chat model, and its problems."""

import pytest

from core.records import read_records
from grpo.environments import find_environment
from tests.tiny import ROOT, run_here


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


def test_the_problems_with_and_without_the_tool_are_the_same_and_none_is_the_example(tmp_path):
    found = []
    for tool in (True, False):
        done = run_here("data/calculator/prepare.py", f"--tool={tool}", "--problems=8099", f"--out={tmp_path}/{tool}")
        assert done.returncode == 0, done.stderr
        found.append(read_records(f"{tmp_path}/{tool}/prompts.jsonl"))
    for with_tool, without in zip(*found, strict=True):
        *example, question = with_tool["prompt"]
        assert [without["prompt"][0]["content"]] == [question["content"] + " Answer with the number only."]
        assert with_tool["answer"] == without["answer"] and with_tool["split"] == without["split"]
        assert [m["role"] for m in example] == ["user", "assistant", "user", "assistant"]
        a, b = question["content"].removeprefix("What is ").removesuffix("?").split("*")
        assert int(a) * int(b) == int(with_tool["answer"]) and (a, b) != ("12", "34")
    assert len({record["prompt"][-1]["content"] for record in found[0]}) == 8099
    assert sum(record["split"] == "val" for record in found[0]) == 810
