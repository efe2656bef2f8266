"""Every value of every built-in reward, and what hostile completions cannot do to the process that scores them."""

import ast
import inspect
import itertools
import math
import random
import re
import sys
from fractions import Fraction

import pytest

from grpo import reward_registry, verifiers
from grpo.reward_registry import REWARDS, reward
from grpo.verifiers import extract_code

END, OPEN, CLOSE = "<end_working_out>", "<SOLUTION>", "</SOLUTION>"
BUILT_IN = {"math_format": (-3, 3), "math_answer": (-4.5, 5), "math_number": (-2.5, 3.5), "countdown": (0, 1),
            "code_correctness": (0, 2), "code_execution": (0, 1), "length_penalty": (-1, 1), "exact_match": (0, 1),
            "contains": (0, 1), "regex": (0, 1), "json_valid": (0, 1), "xml_valid": (0, 1), "repetition": (-1, 0),
            "diversity_bonus": (0, 1)}
COLUMNS = {"math_answer": ["answer"], "math_number": ["answer"], "countdown": ["numbers", "target"],
           "code_execution": ["tests"], "exact_match": ["answer"], "contains": ["answer"], "regex": ["pattern"]}
RECORD = {"answer": "42", "numbers": [1, 2], "target": 3, "tests": "assert f() == 1", "pattern": "a+"}


def score(name, *texts, settings=None, **record):
    """The rewards of texts that all answer one record."""
    columns = {field: [value] * len(texts) for field, value in record.items()}
    scores = REWARDS[name].fn(["?"] * len(texts), list(texts), **columns, **(settings or {}))
    assert len(scores) == len(texts)
    assert all(type(s) is float and REWARDS[name].low <= s <= REWARDS[name].high for s in scores)
    return scores[0] if len(texts) == 1 else scores


def solution(text):
    return f"so{END}{OPEN}{text}{CLOSE}"


def expect(name, cases, **record):
    for text, value in cases.items():
        assert score(name, text, **record) == value, f"{name} of {text!r}"


# the table

def test_math_working_is_the_share_of_true_equations():
    for text, share in (("<start_working_out>7+5=12,4+8+1=13<end_working_out><SOLUTION>1</SOLUTION>", 1.0),
                        ("<start_working_out>7+5=12,4+8+1=14;1-3=-2\n2*2=5<end_working_out>", 0.5),
                        ("7+5=12", 0.0), ("<start_working_out>none<end_working_out>", 0.0), ("", 0.0),
                        ("<start_working_out>99**98**97=1,1/0=1,1=1<end_working_out>", 1 / 3)):
        assert REWARDS["math_working"].fn([""], [text]) == [pytest.approx(share)]


def test_every_built_in_reward_is_registered_with_its_range():
    for name, span in BUILT_IN.items():
        assert (REWARDS[name].low, REWARDS[name].high) == span, name
        assert REWARDS[name].slow == (name == "code_execution")
        assert REWARDS[name].whole_group == (name == "diversity_bonus")


def test_every_built_in_reward_introduces_itself_in_one_line():
    for name in BUILT_IN:
        assert len(inspect.getdoc(REWARDS[name].fn).split("\n")[0].rstrip()) > 40, name


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_empty_completion_has_a_reward_in_range(name):
    settings = {"group_size": 1} if name == "diversity_bonus" else {}
    score(name, "", settings=settings, **RECORD)


@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in COLUMNS.items() for field in fields])
def test_a_missing_field_is_an_error_that_names_the_reward_and_the_field(name, field):
    others = {key: value for key, value in RECORD.items() if key != field}
    message = f"reward {name} needs the field '{field}' in every record"
    with pytest.raises(ValueError, match=message):
        score(name, "x", **others)
    with pytest.raises(ValueError, match=message):
        score(name, "x", **others | {field: None})


def test_a_reward_is_registered_as_it_is_and_a_second_of_its_name_is_refused(monkeypatch):
    monkeypatch.setattr(reward_registry, "REWARDS", {})

    def shout(prompts, completions, **columns):
        return [float(text.isupper()) for text in completions]

    assert reward(shout) is shout
    row = reward_registry.REWARDS["shout"]
    assert (row.fn, row.low, row.high, row.slow, row.whole_group) == (shout, -math.inf, math.inf, False, False)
    assert reward(0, 1, slow=True)(shout) is shout, "the same function may be loaded again"
    assert reward_registry.REWARDS["shout"].slow

    def other(prompts, completions, **columns):
        return [0.0 for _ in completions]

    other.__name__ = "shout"
    with pytest.raises(ValueError, match="reward shout .*already defined"):
        reward(other)


# mathematics

def test_math_format():
    expect("math_format", {
        f"so{END}{OPEN}4{CLOSE}": 3.0, f" so\n{END}\n{OPEN}\n4\n{CLOSE} \n": 3.0,
        f"{END}{OPEN}4{CLOSE}": 1.5, f"so{END}{OPEN} {CLOSE}": 1.5, f"so{END}{OPEN}4{CLOSE} bye": 1.5,
        f"so{END} then {OPEN}4{CLOSE}": 1.5, f"{CLOSE} so{END}{OPEN}4": 1.5, f"{OPEN}4{CLOSE} so {END}": 1.5,
        f"so{OPEN}4{CLOSE}": 0.0, f"so{END}{OPEN}4": 0.0, f"so{END}{OPEN}4{CLOSE}{CLOSE}": 0.0,
        f"so{END}{END}{OPEN}4": -1.5, f"{OPEN * 2}4{CLOSE * 2}{END}": -1.5,
        "": -3.0, "so 4": -3.0, f"{END * 2}{OPEN * 2}{CLOSE * 2}": -3.0, "<solution>4</solution>": -3.0})


def test_math_answer():
    by_answer = {
        "42": {"42": 5.0, " 42\n": 3.5, "42.0": 2.0, "46.2": 2.0, "37.8": 2.0, "46.21": 1.5, "50.4": 1.5, "33.6": 1.5,
               "50.41": -2.5, "33.59": -2.5, "-42": -2.5, "forty-two": -4.5, "": -4.5, "42 cm": -4.5, "$42": -4.5},
        "1000": {"1,000": 2.0, "1,100": 2.0, "1_000": -4.5, "1e3": 2.0, "1,201": -2.5},
        "1,000": {"1,000": 5.0, "1000": 2.0, "900": 2.0, "899": 1.5},
        "1": {"1.1": 2.0, "0.9": 2.0, "1.2": 1.5, "0.8": 1.5, "1.2000000000000000000001": -2.5},
        "0": {"0": 5.0, " 0": 3.5, "0.0": 2.0, "-0": 2.0, "0.0001": -2.5, "-1": -2.5},
        "-10": {"-10": 5.0, "-11": 2.0, "-9": 2.0, "-12": 1.5, "-8": 1.5, "-12.1": -2.5, "10": -2.5},
        "x + 1": {"x + 1": 5.0, "x + 1 ": 3.5, "x+1": -4.5, "3": -2.5},
        "7": {"nan": -4.5, "inf": -4.5, "-Infinity": -4.5, "1e999": -4.5, "1e-999999999": -4.5, "9" * 100000: -4.5,
              "0x7": -4.5, "\uff17": -4.5, "1/7": -4.5, "0" * 9999: -4.5}}
    for answer, cases in by_answer.items():
        expect("math_answer", {solution(text): value for text, value in cases.items()}, answer=answer)


@pytest.mark.parametrize("text", ["", "42", f"{OPEN}42", f"42{CLOSE}", f"{CLOSE}42{OPEN}", f"{OPEN}42{CLOSE}" * 2,
                                  f"{OPEN}{OPEN}42{CLOSE}", f"{OPEN}42{CLOSE}{CLOSE}"])
def test_only_a_single_solution_block_counts(text):
    assert score("math_answer", text, answer="42") == -2.0
    assert score("math_number", text, answer="42") == -2.5


def test_an_answer_may_be_a_number_of_json():
    assert score("math_answer", solution("42"), answer=42) == 5.0
    assert score("math_number", solution("42.50"), answer=42.5) == 3.5
    assert score("exact_match", "42", answer=42) == 1.0


def test_math_number():
    by_answer = {"42": {"42": 3.5, " 42.0 ": 3.5, "it is 42, not 41": 3.5, "=42.": 3.5, "41 or 42": -1.5, "-42": -1.5,
                        "": -2.5, "forty-two": -2.5, "nan": -2.5, "inf": -2.5, "1e999": -2.5, "0" * 9999: -2.5},
                 "1000": {"1,000 apples": 3.5, "1e3": 3.5, "1": -1.5}, "0": {"0": 3.5, "-0.0": 3.5, "0.1": -1.5},
                 "x": {"1": -1.5, "x": -2.5}}
    for answer, cases in by_answer.items():
        expect("math_number", {solution(text): value for text, value in cases.items()}, answer=answer)


# countdown

def test_countdown():
    expect("countdown", {
        "(25 - 1) * 3 + 4": 1.0, " 3*(25-1)+4 = 76": 1.0, "3*(25-1)+4 = 77": 1.0, solution("4 + 3*(25 - 1)"): 1.0,
        solution("(25-1)*3+4=76"): 1.0, "-(1 - 25) * 3 + 4": 1.0, "4 - -(25-1)*3": 1.0,
        f"76 {OPEN}25*3+1{CLOSE}": 0.0, "25*3+1": 0.0, "25 * 3 + 4 - 1 - 1": 0.0, "25 + 3 + 4 + 1": 0.0, "76": 0.0,
        "25*3+1**4": 0.0, "25*3+4//4": 0.0, "25*3 + 1 # 4": 0.0, "+(25-1)*3+4": 0.0, "(25-1)*3+4.0": 0.0,
        "(25-1)*3+0x4": 0.0, "(25-1)3+4": 0.0, "25/(1-1)": 0.0, "(25-1)*3+4\n+0": 0.0, "(25, 1, 3, 4)": 0.0, "()": 0.0,
        "3(25-1)+4": 0.0, "(25-1)*True*3+4": 0.0, "answer: (25-1)*3+4": 0.0, "": 0.0, "=": 0.0,
        solution("(25-1)*3+4") * 2: 0.0}, numbers=[25, 1, 3, 4], target=76)


def test_countdown_is_exact():
    assert score("countdown", "8 / (3 - 8 / 3)", numbers=[3, 3, 8, 8], target=24) == 1.0
    big = 10 ** 17
    assert score("countdown", f"{big} + 1 - 1", numbers=[big, 1, 1], target=big) == 1.0
    assert score("countdown", f"{big} + 1", numbers=[big, 1], target=big) == 0.0


def random_expression(rng, numbers):
    """An expression over the numbers, fully bracketed, and its value by hand; None where it divides by zero."""
    if len(numbers) == 1:
        text, value = str(numbers[0]), Fraction(numbers[0])
        return (f"-{text}", -value) if rng.random() < 0.2 else (text, value)
    cut = rng.randrange(1, len(numbers))
    (left, a), (right, b) = random_expression(rng, numbers[:cut]), random_expression(rng, numbers[cut:])
    symbol = rng.choice("+-*/")
    if a is None or b is None or symbol == "/" and b == 0:
        return f"({left}{symbol}{right})", None
    return f"({left}{symbol}{right})", {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[symbol]


def test_countdown_equals_an_independent_evaluation_of_random_expressions():
    rng, right = random.Random(5), 0
    for _ in range(500):
        numbers = [rng.randrange(0, 9) for _ in range(rng.randrange(1, 6))]
        text, value = random_expression(rng, numbers)
        target = int(value) if value is not None else 0
        expected = float(value is not None and value == target)
        right += expected
        shuffled = rng.sample(numbers, len(numbers))
        assert score("countdown", text, numbers=shuffled, target=target) == expected, text
        assert score("countdown", text, numbers=shuffled, target=target + 1) == 0.0, text
        assert score("countdown", text, numbers=[*numbers, 1], target=target) == 0.0, text
    assert right > 100


HOSTILE = ["99**98**97", "9**9**9**9", "(" * 100000, "(" * 120 + "1" + ")" * 120, "-" * 100000 + "1", "-" * 250 + "1",
           "9" * 1000000, "1" + "+1" * 100000, "1" + "*99" * 90, "1/" * 140 + "1", "(1+1)" * 50, "1" * 299, "1\0+2",
           "().__class__", "__import__('os').system('true')", "[1 for x in range(10**9)]", "lambda: 1", "\ud800"]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12].encode("unicode_escape").decode())
def test_hostile_arithmetic_is_refused_after_little_work(text, monkeypatch):
    parsed, steps = [], itertools.count()
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda source, **how: parsed.append(len(source)) or parse(source, **how))
    sys.setprofile(lambda *event: next(steps))
    try:
        value = REWARDS["countdown"].fn(["?"], [text], numbers=[[99, 98, 97]], target=[1])
    finally:
        sys.setprofile(None)
    assert value == [0.0]
    assert all(length <= verifiers.MAX_EXPRESSION for length in parsed)
    assert next(steps) < 50 * verifiers.MAX_NODES


# texts

def test_matching_rewards():
    expect("exact_match", {"Paris": 1.0, " Paris\n": 1.0, "paris": 0.0, "Paris.": 0.0, "": 0.0}, answer="Paris ")
    expect("contains", {"It is Paris.": 1.0, "Paris": 1.0, "paris": 0.0, "": 0.0}, answer=" Paris")
    expect("contains", {"": 0.0, "anything": 0.0}, answer=" ")
    expect("regex", {"call 555-1234 now": 1.0, "555-123": 0.0, "": 0.0}, pattern=r"\d{3}-\d{4}")
    with pytest.raises(ValueError, match=re.escape("reward regex: pattern '(a' of a record")):
        score("regex", "a", pattern="(a")


def test_length_penalty_is_a_triangle_inside_its_bounds():
    expect("length_penalty", {"": -1.0, "a" * 19: -1.0, "a" * 20: 0.0, "a" * 140: 0.5, "a" * 260: 1.0, "a" * 380: 0.5,
                              "a" * 500: 0.0, "a" * 501: -1.0})
    short = {"length_min": 0, "length_max": 10}
    assert score("length_penalty", "", "a" * 5, "a" * 10, "a" * 11, settings=short) == [0.0, 1.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="length_min=10 < length_max=10"):
        score("length_penalty", "a", settings={"length_min": 10, "length_max": 10})


def test_json_valid():
    expect("json_valid", {
        '{"a": [1, 2.5, null, "x"]}': 1.0, " [] ": 1.0, "3": 1.0, '```json\n{"a": 1}\n```': 1.0,
        'Here you are:\n```\n[1]\n```\nBye.': 1.0, "9" * 10000: 1.0, '{"a": 1': 0.0, "{'a': 1}": 0.0, "[1,]": 0.0,
        "NaN": 0.0, "[Infinity]": 0.0, "-Infinity": 0.0, "": 0.0, "yes": 0.0, "```\n[1]\n```\n```\n[2]\n```": 0.0,
        "[" * 200000: 0.0, "[" * 200000 + "]" * 200000: 0.0})


def test_xml_valid():
    bomb = '<!DOCTYPE a [<!ENTITY x "ha"><!ENTITY y "&x;&x;">]><a>&y;</a>'
    expect("xml_valid", {
        "<a/>": 1.0, '<a b="c">d<e/></a>': 1.0, '<?xml version="1.0"?>\n<a>&lt;</a>': 1.0, "```xml\n<a/>\n```": 1.0,
        "<a>": 0.0, "<a></b>": 0.0, "<a/><b/>": 0.0, "a": 0.0, "": 0.0, "<a b=c/>": 0.0, "<a>&x;</a>": 0.0,
        "<a>\ud800</a>": 0.0, "<a>\0</a>": 0.0, bomb: 0.0, '<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>': 0.0})


def test_repetition_is_the_share_of_repeated_word_4_grams():
    expect("repetition", {"": 0.0, "a b c": 0.0, "a b c d": 0.0, "a b c d e f": 0.0, "a a a a": 0.0, "a a a a a": -0.5,
                          "a b c d a b c d": 4 / 5 - 1, " ".join("a" * 103): 1 / 100 - 1})


def test_diversity_is_the_mean_distance_to_the_rest_of_the_group():
    def bonus(size, *texts):
        return score("diversity_bonus", *texts, settings={"group_size": size})

    assert bonus(2, "a b c", "a b c", "a b c", "d e f") == [0.0, 0.0, 1.0, 1.0], "groups do not see each other"
    assert bonus(3, "a b c", "a b c", "d e f") == [0.5, 0.5, 1.0]
    assert bonus(2, "a b c d", "a b c e") == pytest.approx([2 / 3, 2 / 3])
    assert bonus(2, "abcd", "abce") == pytest.approx([2 / 3, 2 / 3]), "short texts are compared by characters"
    assert bonus(2, "", "") == [0.0, 0.0]
    assert bonus(2, "a", "b") == [1.0, 1.0]
    assert bonus(1, "a", "a") == 2 * [0.0]
    with pytest.raises(ValueError, match="3 completions are no groups of 2"):
        bonus(2, "a", "b", "c")


# code

def test_code_correctness():
    expect("code_correctness", {
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
    assert score("code_execution", good, prose, bad, "", "```\n```", tests=tests) == [1.0, 1.0, 0.0, 0.0, 0.0]
    slow = "import time\ntime.sleep(60)"
    assert score("code_execution", slow, tests="pass", settings={"sandbox_seconds": 0.5}) == 0.0
    for blank in ("", " \n", []):
        with pytest.raises(ValueError, match="reward code_execution needs the field 'tests'"):
            score("code_execution", good, tests=blank)
