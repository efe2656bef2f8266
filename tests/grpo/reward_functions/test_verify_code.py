"""Every value of the rewards of code, and which tests of a record are refused."""

import pytest

from grpo.reward_functions import verify_code
from grpo.reward_functions.asserts import cut
from grpo.reward_functions.registry import REWARDS, Log
from grpo.reward_functions.verify_code import extract_code
from tests.tiny import expect_rewards, rewards_of


def test_code_correctness():
    expect_rewards("code_correctness", {
        "def f(x):\n    return x": 2.0, "```python\ndef f(x):\n    return x\n```": 2.0, "import os": 1.5, "x = 1": 1.0,
        "def f(x):\n  return x": 1.5, "def f(x):\n\treturn x": 1.5, "if x:\n    y = 1": 1.5, "if x:\n  y = 1": 1.0,
        "def f(x:\n    return x": 1.0, "two words": 0.0, "no happy return s": 0.5, "if x\n    y": 0.5, "": 0.0,
        " \n": 0.0, "```python\n\n```": 0.0, "Sure!\n```python\nimport os": 1.5, "x = '\0'": 0.0, "(" * 100000: 0.0,
        "-" * 100000 + "1": 0.0, "1" + "+1" * 1000000: 0.0, "x = 1\n" * 20000: 0.0})


def test_the_last_fenced_block_is_the_code():
    assert extract_code("a = 1") == "a = 1"
    assert extract_code("First:\n```python\na = 1\n```\nBetter:\n```\na = 2\n```\nDone.") == "a = 2\n"
    assert extract_code("Cut off:\n```py\na = 1\nb =") == "a = 1\nb ="


def test_code_execution_is_one_only_if_the_tests_pass():
    good, bad = "def f(x):\n    return 2 * x", "def f(x):\n    return x"
    tests = ["assert f(2) == 4", "assert f(0) == 0"]
    prose = f"Here:\n```python\n{good}\n```\nIt doubles."
    assert rewards_of("code_execution", good, prose, bad, "", "```\n```", tests=tests) == [1.0, 1.0, 0.0, 0.0, 0.0]
    slow = "import time\ntime.sleep(60)"
    assert rewards_of("code_execution", slow, tests="pass", settings={"sandbox_seconds": 0.5}) == 0.0
    for blank in ("", " \n", []):
        with pytest.raises(ValueError, match="reward code_execution needs the field 'tests'"):
            rewards_of("code_execution", good, tests=blank)


def test_tests_of_input_and_output_run_the_code_as_a_program():
    cases = [{"input": "3\n", "output": "6\n"}, {"input": "0\n", "output": "0"}]
    good, constant, function = "print(2 * int(input()))", "print(6)", "def f(x):\n    return 2 * x"
    assert rewards_of("code_execution", f"```python\n{good}\n```", constant, function, tests=cases) == [1.0, 0.0, 0.0]


def test_a_machine_that_is_full_skips_the_completion(monkeypatch):
    monkeypatch.setattr(verify_code, "run_tests", lambda code, *others: "skipped" if code == "a = 1" else "passed")
    assert REWARDS["code_execution"].fn(["?"] * 2, ["a = 1", "b = 1"], tests=["pass"] * 2) == [None, 1.0]


def test_shares_of_completions_by_verdict_and_of_unsafe_tests_are_logged(monkeypatch):
    verdicts = iter(["killed", "passed", "skipped", "killed"])
    monkeypatch.setattr(verify_code, "run_tests", lambda *given: next(verdicts))
    log = Log()
    REWARDS["code_execution"].fn(["?"] * 5, ["a", "b", "", "c", "d"], tests=["pass"] * 5, log_metric=log.log_metric)
    assert log.metrics == {"code_killed": (2.0, 5), "code_failed": (1.0, 5), "code_skipped": (1.0, 5),
                           "unsafe_tests": (5.0, 5)}
    log = Log()
    REWARDS["code_execution"].fn(["?"] * 3, [""] * 3, log_metric=log.log_metric, tests=[
        ["assert f(2) == 4", "assert f(3) == 9"], [{"input": "2", "output": "4"}],
        "for x in (2, 3):\n    assert f(x) == x * x"])
    assert log.metrics["unsafe_tests"] == (1.0, 3)


def test_the_settings_of_the_sandbox_reach_it(monkeypatch):
    seen = []
    monkeypatch.setattr(verify_code, "run_tests", lambda *given: seen.append(given) or "passed")
    settings = {"sandbox_seconds": 2.0, "sandbox_megabytes": 99, "sandbox": "strict"}
    rewards_of("code_execution", "a = 1", tests="pass", settings=settings)
    rewards_of("code_execution", "a = 1", tests="assert f(2) == 4", settings=settings)
    assert seen == [("a = 1", "pass", 2.0, 99, "strict"), ("a = 1", cut("assert f(2) == 4"), 2.0, 99, "strict")]


def test_the_check_of_a_record_refuses_tests_that_are_missing_blank_or_of_a_wrong_type():
    check = REWARDS["code_execution"].check
    for tests, message in ((None, "needs the field 'tests' in every record"), ("", "any code would pass blank tests"),
                           ([" ", "\n"], "any code would pass blank tests"), (5, "tests=5 of a record must be a text"),
                           ([1], r"tests=\[1\] of a record must be a text"), ({"a": 1}, "of a record must be a text"),
                           ([{"input": "1"}], "of a record must be .* a list of {'input': text, 'output': text}"),
                           ([{"input": 1, "output": "1"}], "of a record must be"),
                           ([{"input": "1", "output": "1"}, "pass"], "of a record must be"),
                           ([{"input": "1", "output": " "}], "any code would pass blank tests")):
        with pytest.raises(ValueError, match=f"reward code_execution.*{message}"):
            check(tests=tests, answer="7")
    check(tests="pass", answer=None)
    check(tests=["", "assert f()"])
    check(tests=[{"input": "", "output": "1"}, {"input": "1", "output": ""}])


@pytest.mark.parametrize("tests", ["assert f(2) = 4", ["assert f(2) == 4", "assert ("], "def g():\npass", "x = '\0'",
                                   "x = '\ud800'", "-" * 100000 + "1", "(" * 5000])
def test_the_check_of_a_record_refuses_tests_that_do_not_parse_in_one_short_line(tests):
    with pytest.raises(ValueError, match="^reward code_execution: tests=.* of a record cannot be parsed") as caught:
        REWARDS["code_execution"].check(tests=tests)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_tests_that_the_sandbox_can_run_pass_the_check():
    for tests in ("\ufeffassert f() == 1", ["def g():", "    return f()", "assert g() == 1"]):
        REWARDS["code_execution"].check(tests=tests)
        assert rewards_of("code_execution", "def f():\n    return 1", tests=tests) == 1.0
