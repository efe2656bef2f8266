"""Every value of the rewards of code, and which tests of a record are refused."""

import pytest

from grpo.reward_functions import verify_code
from grpo.reward_functions.registry import REWARDS, Log
from grpo.reward_functions.verify_code import cut, extract_code
from tests.tiny import expect_rewards


def test_code_correctness():
    expect_rewards("code_correctness", {
        "def f(x):\n    return x": 2, "```python\ndef f(x):\n    return x\n```": 2, "import os": 1.5, "x = 1": 1,
        "def f(x):\n  return x": 1.5, "def f(x):\n\treturn x": 1.5, "if x:\n    y = 1": 1.5, "if x:\n  y = 1": 1,
        "def f(x:\n    return x": 1, "two words": 0, "no happy return s": 0.5, "if x\n    y": 0.5, "": 0, " \n": 0,
        "```python\n\n```": 0, "Sure!\n```python\nimport os": 1.5, "(" * 100000: 0, "x = 1\n" * 20000: 0})


def test_the_last_fenced_block_is_the_code():
    assert extract_code("a = 1") == "a = 1"
    assert extract_code("First:\n```python\na = 1\n```\nBetter:\n```\na = 2\n```\nDone.") == "a = 2\n"
    assert extract_code("Cut off:\n```py\na = 1\nb =") == "a = 1\nb ="


def executed(tests, *texts, **settings):
    """(the values of code_execution for texts that all have these tests, its metrics)"""
    log = Log()
    values = REWARDS["code_execution"].fn(["?"] * len(texts), list(texts), tests=[tests] * len(texts),
                                          log_metric=log.log_metric, **settings)
    return values, log.metrics


def test_the_preamble_of_a_record_stands_before_the_code():
    code = "def f(x):\n    return double(x)"
    assert executed("assert f(2) == 4", code, "", preamble=["def double(x):\n    return 2 * x"] * 2)[0] == [1, 0]
    assert executed("assert f(2) == 4", code, code, preamble=["double = int", None])[0] == [0, 0]


GOOD, BAD = "def f(x):\n    return 2 * x", "def f(x):\n    return x"


@pytest.mark.parametrize(("tests", "expected"), [
    (["assert f(2) == 4", "assert f(0) == 0"], {GOOD: 1, f"Here:\n```python\n{GOOD}\n```\nIt doubles.": 1, BAD: 0, "": 0,
                                                "```\n```": 0}),
    ([{"input": "3\n", "output": "6\n"}, {"input": "0\n", "output": "0"}],
     {"```python\nprint(2 * int(input()))\n```": 1, "print(6)": 0, GOOD: 0}),
    ("\ufeffassert f(2) == 4", {GOOD: 1}), (["def g():", "    return f(1)", "assert g() == 2"], {GOOD: 1})])
def test_code_execution_is_one_only_if_the_tests_pass(tests, expected):
    REWARDS["code_execution"].check(tests=tests)
    assert executed(tests, *expected)[0] == list(expected.values())


def test_the_verdicts_and_settings_of_the_sandbox_are_taken_over_and_counted(monkeypatch):
    """A machine that is full skips the completion. Tests that cannot be cut into calls are not safe."""
    seen, verdicts = [], iter(["killed", "passed", "skipped", "killed"])
    monkeypatch.setattr(verify_code, "run_tests", lambda *given: seen.append(given) or next(verdicts))
    values, metrics = executed("pass", "a", "b", "", "c", "d", sandbox_seconds=2.0, sandbox_megabytes=99, sandbox="strict")
    assert values == [0.0, 1.0, 0.0, None, 0.0] and seen[0] == ("a", "pass", 2.0, 99, "strict")
    assert metrics == {"code_killed": (2.0, 5), "code_failed": (1.0, 5), "code_skipped": (1.0, 5),
                       "unsafe_tests": (5.0, 5)}
    asserts = ["assert f(2) == 4", "assert f(3) == 9"]
    monkeypatch.setattr(verify_code, "run_tests", lambda code, tests, *others: seen.append(tests) or "passed")
    assert executed(asserts, "a")[1]["unsafe_tests"] == (0.0, 1) and seen[-1] == cut("\n".join(asserts))
    assert executed([{"input": "2", "output": "4"}], "a")[1]["unsafe_tests"] == (0.0, 1)


@pytest.mark.parametrize("tests", [
    "", [" ", "\n"], [{"input": "1", "output": " "}], 5, [{"input": "1"}],
    [{"input": "1", "output": "1"}, "pass"], "assert f(2) = 4",
    ["assert f(2) == 4", "assert ("], "(" * 5000])
def test_the_check_of_a_record_refuses_tests_in_one_short_line(tests):
    with pytest.raises(ValueError, match="^reward code_execution: tests=.* of a record") as caught:
        REWARDS["code_execution"].check(tests=tests)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
