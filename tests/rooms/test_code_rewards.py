"""Every value of the rewards of code; tests that are cut into calls are judged as Python judges them."""

import collections
import math

import pytest

from core.errors import Mistake
from grpo.reward_functions import verify_code
from grpo.reward_functions.registry import REWARDS
from grpo.reward_functions.verify_code import cut
from grpo.sandbox.child import literal
from grpo.sandbox.run import run_tests
from tests.tiny import expect_rewards


def test_code_correctness():
    expect_rewards("code_correctness", {
        "def f(x):\n    return x": 2, "```python\ndef f(x):\n    return x\n```": 2, "import os": 1.5, "x = 1": 1,
        "def f(x):\n  return x": 1.5, "def f(x):\n\treturn x": 1.5, "if x:\n    y = 1": 1.5, "if x:\n  y = 1": 1,
        "def f(x:\n    return x": 1, "two words": 0, "no happy return s": 0.5, "if x\n    y": 0.5, "": 0, " \n": 0,
        "```python\n\n```": 0, "Sure!\n```python\nimport os": 1.5, "(" * 100000: 0, "x = 1\n" * 20000: 0})


def executed(tests, *texts, **columns):
    """(the values of code_execution for texts that all have these tests, {metric: its values})"""
    metrics = collections.defaultdict(list)
    values = REWARDS["code_execution"].fn(["?"] * len(texts), list(texts), tests=[tests] * len(texts),
                                          log_metric=lambda name, x: metrics[name].append(x), **columns)
    return values, metrics


GOOD, BAD = "def f(x):\n    return 2 * x", "def f(x):\n    return x"


@pytest.mark.parametrize(("tests", "expected"), [
    (["assert f(2) == 4", "assert f(0) == 0"],
     {GOOD: 1, f"Here:\n```python\n{GOOD}\n```\nIt doubles.": 1, BAD: 0, "": 0, "```\n```": 0,
      f"First:\n```python\n{BAD}\n```\nBetter:\n```py\n{GOOD}": 1}),
    ([{"input": "3\n", "output": "6\n"}, {"input": "0\n", "output": "0"}],
     {"```python\nprint(2 * int(input()))\n```": 1, "print(6)": 0, GOOD: 0}),
    ("\ufeffassert f(2) == 4", {GOOD: 1}), (("assert f(2) == 4",), {GOOD: 1}),
    (["def g():", "    return f(1)", "assert g() == 2"], {GOOD: 1})])
def test_code_execution_is_one_only_if_the_tests_pass(tests, expected):
    REWARDS["code_execution"].check(tests=tests)
    assert executed(tests, *expected)[0] == list(expected.values())


def test_the_preamble_of_a_record_stands_before_the_code():
    code = "def f(x):\n    return double(x)"
    preamble = ["def double(x):\n    return 2 * x"] * 2 + [None]
    assert executed("assert f(2) == 4", code, "", code, preamble=preamble)[0] == [1, 0, 0]


def test_verdicts_are_counted_and_a_machine_that_is_full_skips_the_completion(monkeypatch):
    verdicts = iter(["killed", "passed", "skipped", "passed", "passed"])
    monkeypatch.setattr(verify_code, "run_tests", lambda *given: next(verdicts))
    values, metrics = executed("pass", "a", "b", "", "c")
    assert values == [0.0, 1.0, 0.0, None]
    assert metrics == {"code_killed": [1, 0, 0, 0], "code_failed": [0, 0, 1, 0], "code_skipped": [0, 0, 0, 1],
                       "unsafe_tests": [1] * 4}
    for safe in (["assert f(2) == 4", "assert f(3) == 9"], [{"input": "2", "output": "4"}]):
        assert executed(safe, "a")[1]["unsafe_tests"] == [0]


@pytest.mark.parametrize("tests", [[{"input": "1", "output": " "}], 5, "(" * 5000, [{"input": "1"}, "pass"]])
def test_tests_of_another_form_are_refused(tests):
    with pytest.raises(Mistake, match="code_execution.*tests="):
        REWARDS["code_execution"].check(tests=tests)


FORMS = [
    "f(1) == 4", "4 == f(1)", "f(1) != 4", "f(1) < 5", "-1 <= f(1)", "f(1) > 2 / 3", "f(1)", "not f(1)", "f(1) is True",
    "f(1) is None", "f(1) in [4, None, '4']", "4 in f(1)", "f(1) not in (4, 0)", "abs(f(1) - 4) < 1e-6", "f(1) == [4]",
    "math.isclose(f(1), 4.0, rel_tol=1e-3)", "math.fabs(f(1) - 4) <= 0", "round(f(1), 2) == 4", "f(1) == float('inf')",
    "set(f(1)) == set([4])", "sorted(f(1), reverse=True) == [4]", "isinstance(f(1), int)", "len(f(1)) == 1"]
VALUES = [4, 4.0, 4.003, True, None, 0, "4", "", b"4", [4], (4,), {4}, {4: 4}, [[4]], math.nan, math.inf, -7, 4j]
CHECK = ("METADATA = {'author': 'x'}\n\ndef check(candidate):\n    '''Squares.'''\n    import math\n"
         "    assert True, 'This prints'\n    assert candidate(2) == 4, 'two'\n"
         "    assert math.fabs(candidate(3) - 9) < 1e-6\n\ncheck(square)")


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_is_judged_as_python_judges_the_value(form):
    claims = cut(f"import math\nassert {form}")
    call, = claims.questions
    assert "f(1)" in call and "4" not in call
    for value in VALUES:
        names = {"f": lambda argument: value, "math": math}
        try:
            right, answer = bool(eval(form, names)), literal(eval(call, names))
        except (TypeError, OverflowError):
            right, answer = False, "..."
        assert claims.hold([answer]) == right, value


@pytest.mark.parametrize(("tests", "questions"), [
    ("assert f(2) == 4\nassert f([1], key=None) == {1: 2}", ("f(2)", "f([1], key=None)")),
    ("x = [3, 1]\ny = 2\nassert f(x, y) == [1, 3]", ("f([3, 1], 2)",)),
    ("assert f(float('inf'), [0] * 3, range(4)) == 1", ("f(float('inf'), [0] * 3, range(4))",)),
    ("assert decode(encode('a')) == 'a'", ("decode(encode('a'))",)),
    (CHECK, ("square(2)", "square(3)"))])
def test_only_the_calls_are_asked(tests, questions):
    assert cut(tests).questions == questions


@pytest.mark.parametrize("tests", [
    "", "pass", "f(2)", "assert 1", "assert f(2) == f(3)", "assert f(2) == sum([1, 3])", "assert sum(10, 15) == 6",
    "assert all(f(x) == x for x in [1])", "for x in [1]:\n    assert f(x) == 1", "x = f(2)\nassert x == 4",
    "import random\nassert f(random.random()) < 1", "from math import *\nassert f(2) == 4",
    "from math import sqrt\nassert f(2) == sqrt(4)", "def f(x):\n    return 4\nassert f(2) == 4", "assert f(2).x == 4",
    "def check(candidate):\n    assert candidate(2) == 4", "x = 3\nassert f([x for x in [1]]) == 1",
    "assert (f(2), f(3)) == (4, 9)", "assert f(2) == 10 ** 10 ** 10", "assert 3 < f(2) < 5", "assert ("])
def test_tests_of_another_form_are_not_cut(tests):
    assert cut(tests) is None


@pytest.mark.parametrize("answer", ["", "...", "5", "f(2)", "[4", "__import__('os')", "3 # 4", "(" * 9999,
                                    "'x' * 10 ** 9", "9" * 99999, "{[]}"])
def test_an_answer_that_is_not_the_expected_literal_does_not_hold(answer):
    assert not cut("assert f(2) == 4 + 1j").hold([answer])
    assert not cut("assert abs(f(2) - 4) < 0.1").hold([answer])
    assert not cut("assert f(2) == 4\nassert f(3) == 9").hold(["4"]), "all must be answered"


LONG = f"assert f() == {list(range(12000))}"  # more than a pipe holds


@pytest.mark.parametrize(("code", "tests", "verdict"), [
    ("def f(x):\n    x.append(0)\n    return len(x)", "x = []\nassert f(x) == 1\nassert f(x) == 1", "passed"),
    ("def f(x):\n    yield from x", "assert list(f([1, 2])) == [1, 2]", "passed"),
    ("def f():\n    print([0])\n    return list(range(12000))", LONG, "passed"),
    ("def f():\n    return list(range(200000))", LONG, "killed"), ("def f():\n    return 10 ** 9999", LONG, "failed"),
    ("def f():\n    x = []\n    x.append(x)\n    return x", LONG, "failed"), ("def f():\n    exit()", LONG, "failed")])
def test_arguments_are_new_for_each_call_and_results_have_a_limited_size_and_depth(code, tests, verdict):
    assert run_tests(code, cut(tests)) == verdict
