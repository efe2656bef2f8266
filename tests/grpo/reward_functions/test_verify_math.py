"""Every value of the rewards of mathematics, and that hostile completions cost little work."""

import ast
import itertools
import random
import sys
from fractions import Fraction

import pytest

from grpo.reward_functions import verify_math
from grpo.reward_functions.registry import REWARDS
from grpo.reward_functions.verify_math import equations
from tests.tiny import expect_rewards, rewards_of

END, OPEN, CLOSE = "<end_working_out>", "<SOLUTION>", "</SOLUTION>"


def solution(text):
    return f"so{END}{OPEN}{text}{CLOSE}"


def test_math_format():
    expect_rewards("math_format", {
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
        expect_rewards("math_answer", {solution(text): value for text, value in cases.items()}, answer=answer)


@pytest.mark.parametrize("text", ["", "42", f"{OPEN}42", f"42{CLOSE}", f"{CLOSE}42{OPEN}", f"{OPEN}42{CLOSE}" * 2,
                                  f"{OPEN}{OPEN}42{CLOSE}", f"{OPEN}42{CLOSE}{CLOSE}"])
def test_only_a_single_solution_block_counts(text):
    assert rewards_of("math_answer", text, answer="42") == -2.0
    assert rewards_of("math_number", text, answer="42") == -2.5


def test_math_number():
    by_answer = {"42": {"42": 3.5, " 42.0 ": 3.5, "it is 42, not 41": 3.5, "=42.": 3.5, "41 or 42": -1.5, "-42": -1.5,
                        "": -2.5, "forty-two": -2.5, "nan": -2.5, "inf": -2.5, "1e999": -2.5, "0" * 9999: -2.5},
                 "1000": {"1,000 apples": 3.5, "1e3": 3.5, "1": -1.5}, "0": {"0": 3.5, "-0.0": 3.5, "0.1": -1.5},
                 "x": {"1": -1.5, "x": -2.5}}
    for answer, cases in by_answer.items():
        expect_rewards("math_number", {solution(text): value for text, value in cases.items()}, answer=answer)
    assert rewards_of("math_answer", solution("42"), answer=42) == 5.0, "an answer may be a number of JSON"
    assert rewards_of("math_number", solution("42.50"), answer=42.5) == 3.5


def test_math_working_is_the_share_of_true_equations():
    for text, share in (("<start_working_out>7+5=12,4+8+1=13<end_working_out><SOLUTION>1</SOLUTION>", 1.0),
                        ("<start_working_out>7+5=12,4+8+1=14;1-3=-2\n2*2=5<end_working_out>", 0.5),
                        ("7+5=12", 0.0), ("<start_working_out>none<end_working_out>", 0.0), ("", 0.0),
                        ("<start_working_out>99**98**97=1,1/0=1,1=1<end_working_out>", 1 / 3)):
        assert REWARDS["math_working"].fn([""], [text]) == [pytest.approx(share)]


def test_countdown():
    expect_rewards("countdown", {
        "(25 - 1) * 3 + 4": 1.0, " 3*(25-1)+4 = 76": 1.0, "3*(25-1)+4 = 77": 1.0, solution("4 + 3*(25 - 1)"): 1.0,
        solution("(25-1)*3+4=76"): 1.0, "-(1 - 25) * 3 + 4": 1.0, "4 - -(25-1)*3": 1.0,
        f"76 {OPEN}25*3+1{CLOSE}": 0.0, "25*3+1": 0.0, "25 * 3 + 4 - 1 - 1": 0.0, "25 + 3 + 4 + 1": 0.0, "76": 0.0,
        "25*3+1**4": 0.0, "25*3+4//4": 0.0, "25*3 + 1 # 4": 0.0, "+(25-1)*3+4": 0.0, "(25-1)*3+4.0": 0.0,
        "(25-1)*3+0x4": 0.0, "(25-1)3+4": 0.0, "25/(1-1)": 0.0, "(25-1)*3+4\n+0": 0.0, "(25, 1, 3, 4)": 0.0, "()": 0.0,
        "3(25-1)+4": 0.0, "(25-1)*True*3+4": 0.0, "answer: (25-1)*3+4": 0.0, "": 0.0, "=": 0.0,
        solution("(25-1)*3+4") * 2: 0.0}, numbers=[25, 1, 3, 4], target=76)


def test_countdown_is_exact():
    assert rewards_of("countdown", "8 / (3 - 8 / 3)", numbers=[3, 3, 8, 8], target=24) == 1.0
    big = 10 ** 17
    assert rewards_of("countdown", f"{big} + 1 - 1", numbers=[big, 1, 1], target=big) == 1.0
    assert rewards_of("countdown", f"{big} + 1", numbers=[big, 1], target=big) == 0.0


@pytest.mark.parametrize(("numbers", "target", "message"), [
    (None, 3, "needs the field 'numbers' in every record"), ([1], None, "needs the field 'target' in every record"),
    ("12", 3, "numbers='12' of a record must be a list"), (7, 7, "numbers=7 of a record must be a list"),
    ({"1": 2}, 3, "must be a list of numbers"), ([1, "x"], 1, r"numbers=\[1, 'x'\] of a record: 'x' is not a number"),
    ([1, None], 1, "None is not a number"), ([[1]], 1, r"numbers=\[\[1\]\] .* \[1\] is not a number"),
    ([True], 1, "True is not a number"), ([1, float("inf")], 1, "inf is not a number"), ([1], [1], r"target=\[1\] of"),
    ([1], "one", "target='one' of a record: 'one' is not a number"), ([1], {}, r"target=\{\} of"),
    ([1], "", "target=''"), ([1], "1/0", "target='1/0'"), ([1], float("nan"), "target=nan"),
    ([1], float("-inf"), "target=-inf"), ([1], "9" * 5000, "target='999"),
    *(([1], bomb, "target=.* is not a number, or has too many digits$")
      for bomb in ("1e1000000000", "1E+1_000_000_000", "-1e-1000000000", "1e１００００００００"))])
def test_a_countdown_record_without_numbers_is_refused_in_one_line(numbers, target, message):
    with pytest.raises(ValueError, match=f"^reward countdown.*{message}") as caught:
        REWARDS["countdown"].check(numbers=numbers, target=target, answer="7")
    assert "\n" not in str(caught.value)


def test_countdown_takes_numbers_in_any_notation():
    for numbers, target in (([2, 3], 5), ([2.0, "3"], "5"), ((2, 3), 5.0), (["6/3", " 3 "], "10/2")):
        REWARDS["countdown"].check(numbers=numbers, target=target)
        assert rewards_of("countdown", "2+3", "3-2", numbers=numbers, target=target) == [1.0, 0.0]


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
        assert rewards_of("countdown", text, numbers=shuffled, target=target) == expected, text
        assert rewards_of("countdown", text, numbers=shuffled, target=target + 1) == 0.0, text
        assert rewards_of("countdown", text, numbers=[*numbers, 1], target=target) == 0.0, text
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
    assert all(length <= verify_math.MAX_EXPRESSION for length in parsed)
    assert next(steps) < 50 * verify_math.MAX_NODES


@pytest.mark.parametrize(("prompt", "text", "truth", "worth"), [
    ("3\n1+_=3\n10+5=15\n_+4", "3\n1+2=3\n10+5=15\n4+4", "3\n1+2=3\n10+5=15\n4+4", 1.0),
    ("3\n1+_=3\n10+5=15\n_+4", "3\n1+3=3\n10+5=15\n4+4", "3\n1+2=3\n10+5=15\n4+4", 0.0),
    ("3\n1+2=3\n_", "3\n1+2=3\n4", "3\n1+2=3\n4", None),  # no whole line was masked
    ("3\n_+_=3\n1_+5=15\n", "3\n2+1=3\n11+5=15\n", "3\n1+2=3\n10+5=15\n", 0.5),
    ("4_1+2=3\n", "441+2=3\n", "4\n1+2=3\n", 0.0),  # its line break was masked
    *(("_______7", line + "7", "\n1+2=3\n7", worth) for line, worth in (
        ("\n1+2=3\n", 1.0), ("\n2+1=37", 0.0), ("71+2=3\n", 0.0), ("\n+3=3 \n", 0.0), ("\n3=3  \n", 0.0),
        ("\n 1+2=3", 0.0), ("\n01+2=", 0.0), ("\n3+0=3\n", 1.0), ("\n3=3+0\n", 0.0)))])
def test_equations_checks_the_lines_that_were_touched(prompt, text, truth, worth):
    assert equations([prompt], [text], answer=[truth]) == [worth]
