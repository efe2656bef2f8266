"""Every value of the rewards of mathematics, and that hostile completions cost little work."""

import ast
import contextlib
import random
import re
from fractions import Fraction
from types import SimpleNamespace

import pytest

from grpo.reward_functions import verify_math
from grpo.reward_functions.registry import REWARDS
from grpo.rewards import Rewards
from tests.tiny import config, expect_rewards, rewards_of

END, OPEN, CLOSE = "<end_working_out>", "<SOLUTION>", "</SOLUTION>"


def solution(text):
    return f"so{END}{OPEN}{text}{CLOSE}"


def test_math_format():
    expect_rewards("math_format", {
        f" so\n{END}\n{OPEN}\n4\n{CLOSE} \n": 3, f"{END}{OPEN}4{CLOSE}": 1.5, f"so{END}{OPEN} {CLOSE}": 1.5,
        f"so{END}{OPEN}4{CLOSE} bye": 1.5, f"so{END} then {OPEN}4{CLOSE}": 1.5, f"{OPEN}4{CLOSE} so {END}": 1.5,
        f"so{OPEN}4{CLOSE}": 0, f"so{END}{OPEN}4": 0, f"so{END}{OPEN}4{CLOSE}{CLOSE}": 0,
        f"{OPEN * 2}4{CLOSE * 2}{END}": -1.5, "<solution>4</solution>": -3})


@pytest.mark.parametrize(("name", "answer", "values"), [
    ("math_answer", "42", {"42": 5, " 42\n": 3.5, "42.0": 2, "46.2": 2, "37.8": 2, "46.21": 1.5, "50.4": 1.5,
                           "33.6": 1.5, "50.41": -2.5, "-42": -2.5, "forty-two": -4.5, "": -4.5, "42 cm": -4.5}),
    ("math_answer", "1,000", {"1,000": 5, "1000": 2, "899": 1.5, "1_000": -4.5}),
    ("math_answer", "1", {"1.1": 2, "1.2": 1.5, "1.2000000000000000000001": -2.5}),
    ("math_answer", "0", {"0": 5, "-0": 2, "0.0001": -2.5}),
    ("math_answer", "x + 1", {"x + 1": 5, "x + 1 ": 3.5, "x+1": -4.5, "3": -2.5}),
    ("math_answer", "7", {"nan": -4.5, "-Infinity": -4.5, "1e999": -4.5, "9" * 100000: -4.5, "\uff17": -4.5}),
    ("math_answer", 42, {"42": 5}),  # a number of JSON
    ("math_number", "42", {"42": 3.5, " 42.0 ": 3.5, "it is 42, not 41": 3.5, "=42.": 3.5, "41 or 42": -1.5,
                           "-42": -1.5, "": -2.5, "forty-two": -2.5, "nan": -2.5, "1e999": -2.5, "0" * 9999: -2.5}),
    ("math_number", "1000", {"1,000 apples": 3.5, "1e3": 3.5, "1": -1.5}),
    ("math_number", "0", {"-0.0": 3.5, "0.1": -1.5}), ("math_number", "x", {"1": -1.5, "x": -2.5})])
def test_the_solution_is_compared_with_the_answer(name, answer, values):
    expect_rewards(name, {solution(text): value for text, value in values.items()}, answer=answer)


@pytest.mark.parametrize("text", ["42", f"{OPEN}42", f"{CLOSE}42{OPEN}", f"{OPEN}42{CLOSE}" * 2,
                                  f"{OPEN}42{CLOSE}{CLOSE}"])
def test_only_a_single_solution_block_counts(text):
    assert rewards_of("math_answer", text, answer="42") == -2.0
    assert rewards_of("math_number", text, answer="42") == -2.5


def test_math_working_is_the_share_of_true_equations():
    expect_rewards("math_working", {
        f"<start_working_out>7+5=12,4+8+1=14;1-3=-2\n2*2=5{END}": 0.5, "7+5=12": 0, f"<start_working_out>none{END}": 0,
        f"<start_working_out>99**98**97=1,1/0=1,1=1{END}": 1 / 3})


COUNTDOWN = [
    ([25, 1, 3, 4], 76, {
        "(25 - 1) * 3 + 4": 1, "3*(25-1)+4 = 77": 1, solution("(25-1)*3+4=76"): 1, "4 - -(25-1)*3": 1,
        f"76 {OPEN}25*3+1{CLOSE}": 0, "25*3+1": 0, "25 * 3 + 4 - 1 - 1": 0, "25*3+1**4": 0, "25*3+4//4": 0,
        "25*3 + 1 # 4": 0, "(25-1)*3+4.0": 0, "25/(1-1)": 0, "()": 0, "3(25-1)+4": 0, "answer: (25-1)*3+4": 0, "": 0,
        solution("(25-1)*3+4") * 2: 0}),
    ([3, 3, 8, 8], 24, {"8 / (3 - 8 / 3)": 1}),
    ([10**17, 1, 1], 10**17, {f"{10**17} + 1 - 1": 1}), ([10**17, 1], 10**17, {f"{10**17} + 1": 0}),
    *((numbers, target, {"2+3": 1, "3-2": 0}) for numbers, target in (([2.0, "3"], "5"), ((2, 3), 5.0)))]


@pytest.mark.parametrize(("numbers", "target", "values"), COUNTDOWN)
def test_countdown_is_exact_in_any_notation_of_numbers(numbers, target, values):
    REWARDS["countdown"].check(numbers=numbers, target=target)
    expect_rewards("countdown", values, numbers=numbers, target=target)


def random_expression(rng, numbers):
    """An expression over the numbers, fully bracketed."""
    if len(numbers) == 1:
        return rng.choice(["", "", "", "-"]) + str(numbers[0])
    cut = rng.randrange(1, len(numbers))
    left, right = random_expression(rng, numbers[:cut]), random_expression(rng, numbers[cut:])
    return f"({left}{rng.choice('+-*/')}{right})"


def test_countdown_equals_an_independent_evaluation_of_random_expressions():
    rng, right = random.Random(5), 0
    for _ in range(300):
        numbers = [rng.randrange(0, 9) for _ in range(rng.randrange(1, 6))]
        text = random_expression(rng, numbers)
        try:
            value = eval(re.sub(r"(\d+)", r"Fraction(\1)", text), {"Fraction": Fraction})
        except ZeroDivisionError:
            value = None
        target = 0 if value is None else int(value)
        right += value == target
        shuffled = rng.sample(numbers, len(numbers))
        for used, number, expected in ((shuffled, target, value == target), (shuffled, target + 1, False),
                                       ([*numbers, 1], target, False)):
            assert rewards_of("countdown", text, numbers=used, target=number) == expected, text
    assert right > 60


@pytest.mark.parametrize("text", ["99**98**97", "(" * 100000, "(" * 120 + "1" + ")" * 120, "-" * 250 + "1",
                                  "9" * 1000000, "1" + "*99" * 90, "().__class__"], ids=len)
def test_hostile_arithmetic_is_never_parsed_at_length(text, monkeypatch):
    parsed, parse = [], ast.parse
    monkeypatch.setattr(ast, "parse", lambda source, **how: parsed.append(len(source)) or parse(source, **how))
    assert rewards_of("countdown", text, numbers=[99, 98, 97], target=1) == 0.0
    assert all(length <= verify_math.MAX_EXPRESSION for length in parsed)


@pytest.mark.parametrize("answer, text, score", [
    (r"\frac{1}{2}", "so $0.5$", 1), (r"\frac12", r"\boxed{1/2}", 1), (r"\frac12", r"\boxed{2}", 0),
    (r"2\sqrt{3}", r"$\sqrt{12}$", 1), ("x^2+2x+1", r"\boxed{(x+1)^2}", 1), ("x^2+2x+1", r"\boxed{(x-1)^2}", 0),
    (r"\{1,2\}", r"$\{2,1\}$", 1), ("[0,1)", "$[0,1]$", 0), (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1),
    ("42", "It is 42.", 1), ("42", "", 0), ("42", r"42, no: \boxed{41}", 0), ("So it is $\\frac34$.", "0.75", 1),
    (42, "42", 1), ("42", r"\boxed{__import__('os')}", 0), (" ", "$3$", None)])
def test_an_answer_in_latex_is_compared_by_its_value(answer, text, score):
    pytest.importorskip("math_verify")
    metrics = {}
    assert REWARDS["math_verify"].fn([""], [text], [answer], log_metric=metrics.__setitem__) == [score]
    assert metrics == {"unread_answers": score is None}


@pytest.mark.slow
def test_a_completion_that_would_take_for_ever_is_wrong_and_the_others_are_scored():
    pytest.importorskip("math_verify")
    texts = SimpleNamespace(prompts=[""] * 4, completions=["$42$", "$9^{9^{9^{9}}}$", r"\boxed{99999999!}", "$41$"],
                            completion_ids=[[]] * 4, columns={"answer": ["42"] * 4})
    with contextlib.closing(Rewards(config(reward_functions=("math_verify",)))) as rewards:
        assert rewards.score(texts, 4)[0]["math_verify"].tolist() == [1, 0, 0, 0]
