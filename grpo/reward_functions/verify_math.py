"""Rewards that check a mathematical answer. Completions are parsed and computed within bounds, never run as code."""

import ast
import logging
import math
import operator
import re
import warnings
from fractions import Fraction

from core.errors import Mistake
from core.records import answer_texts
from core.settings.optional import require
from grpo.reward_functions.registry import check_answer, reward

END = "<end_working_out>"
OPEN, CLOSE = "<SOLUTION>", "</SOLUTION>"
TAGS = [END, OPEN, CLOSE]
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
MAX_DIGITS = 100  # characters of a number; exact arithmetic is slow beyond
EXPRESSION = re.compile(r"[0-9+\-*/() \t\n]+")
MAX_EXPRESSION = 300  # characters, so that its tree and its numbers are small
OPERATORS = {"Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv}


@reward(-3, 3, tags=TAGS)
def math_format(prompts, completions, **columns):
    """3 for text, <end_working_out>, <SOLUTION>..</SOLUTION> only; else 0.5 for each tag that occurs once, -1 if not.

    Text and solution must not be blank. Elsewhere only white space is allowed.
    """
    scores = []
    for text in completions:
        pieces = re.split(f"({END}|{OPEN}|{CLOSE})", text)
        texts = pieces[::2]
        tags = pieces[1::2]
        filled = [piece.strip() != "" for piece in texts]
        if tags == TAGS and filled == [True, False, True, False]:
            scores.append(3.0)
        else:
            scores.append(sum(0.5 if text.count(tag) == 1 else -1.0 for tag in TAGS))
    return scores


@reward(-4.5, 5, check=check_answer, tags=TAGS[1:])
def math_answer(prompts, completions, answer, **columns):
    """Solution vs `answer`: 5 equal, 3.5 stripped, 2 in 10%, 1.5 in 20%, -2.5 further off, -4.5 no number, -2 no block.

    5 and 3.5 compare texts: equal numbers in different notation (1,000 and 1000) get 2. Distances are shares of
    |answer|, including the limits. If the answer is not a number, only the texts are compared. In a list of answers the
    best one counts.
    """
    scores = []
    for text, correct in zip(completions, answer, strict=True):
        block = solution(text)
        values = [score_answer(block, truth) for truth in answer_texts(correct)]
        scores.append(max(values))
    return scores


@reward(-2.5, 3.5, check=check_answer, tags=TAGS[1:])
def math_number(prompts, completions, answer, **columns):
    """First number in the SOLUTION block vs `answer`, or one of a list: 3.5 equal, -1.5 unequal, -2.5 no number.

    Without a block there is no number.
    """
    scores = []
    for text, correct in zip(completions, answer, strict=True):
        block = solution(text) or ""
        found = NUMBER.search(block.replace(",", ""))
        guess = number(found[0]) if found else None
        truths = map(number, answer_texts(correct))
        if guess is None:
            scores.append(-2.5)
        else:
            scores.append(3.5 if guess in truths else -1.5)
    return scores


@reward(0, 1, slow=True, check=check_answer)
def math_verify(prompts, completions, answer, *, log_metric, **columns):
    """1 if the package math-verify finds the formula equal to `answer`, or one of a list; None if it reads no answer.

    The formula is the one in \\boxed{}, else the last one in $ $, else the last number. `answer` is LaTeX: bare, or a
    text with such a formula. A comparison that takes longer than 5 seconds counts as unequal.
    """
    package = require("math_verify", "reward math_verify", "math-verify[antlr4_13_2]")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # else it prints formulas that take too long
    scores = []
    for text, correct in zip(completions, answer, strict=True):
        expected = []
        for truth in answer_texts(correct):
            if "$" not in truth and "\\boxed" not in truth:  # a bare formula
                truth = f"\\boxed{{{truth}}}"
            parsed = package.parse(truth)
            if parsed:
                expected.append(parsed)
        log_metric("unread_answers", not expected)
        found = package.parse(text)
        score = float(any(package.verify(each, found) for each in expected))
        scores.append(score if expected else None)
    return scores


@reward(0, 1, tags=[END])
def math_working(prompts, completions, **columns):
    """Share of the equations before <end_working_out>, such as 7+5=12, that are true; 0 if there is none."""
    scores = []
    for text in completions:
        working_out, end, _ = text.partition(END)
        working_out = working_out.partition(">")[2]  # after <start_working_out>
        true = 0
        count = 0
        for part in re.split("[,;\n]", working_out):
            left, equals, right = part.partition("=")
            if end and equals:
                value = arithmetic(left)
                count += 1
                true += value is not None and value == number(right)
        scores.append(true / count if count else 0.0)
    return scores


def countdown_task(numbers, target, **columns):
    """(sorted numbers, target) of a countdown record, exact. Raises Mistake if they are not numbers."""
    is_list = isinstance(numbers, (list, tuple))
    given = [number(str(x)) for x in numbers] if is_list else [None]
    aim = number(str(target))
    if None in [*given, aim]:
        raise Mistake(f"reward countdown: numbers={numbers!r:.100} and target={target!r:.100} of a record must be "
                      f"a list of numbers and a number, of at most {MAX_DIGITS} characters each")
    return sorted(given), aim


@reward(0, 1, check=countdown_task)
def countdown(prompts, completions, numbers, target, **columns):
    """1 if the expression uses each of `numbers` exactly once and its value is exactly `target`; else 0.

    The expression, of integers, + - * / and parentheses, is the only SOLUTION block or the completion, up to "=".
    """
    scores = []
    for text, own_numbers, own_target in zip(completions, numbers, target, strict=True):
        given, aim = countdown_task(own_numbers, own_target)
        block = solution(text)
        if block is None:
            block = text
        expression = block.partition("=")[0]
        found = re.findall("[0-9]+", expression)
        is_solved = arithmetic(expression) == aim and sorted(map(int, found)) == given
        scores.append(float(is_solved))
    return scores


def solution(text):
    """The text of the only <SOLUTION>..</SOLUTION> block; None if there is none, or more than one."""
    pieces = re.split(f"({OPEN}|{CLOSE})", text)
    tags = pieces[1::2]
    return pieces[2] if tags == [OPEN, CLOSE] else None


def score_answer(block, answer):
    """The value of math_answer for a SOLUTION block, or None, against one answer."""
    if block is None:
        return -2.0
    if block == answer:
        return 5.0
    if block.strip() == answer.strip():
        return 3.5
    guess = number(block)
    if guess is None:
        return -4.5
    truth = number(answer)
    if truth is None:
        return -2.5
    off = abs(guess - truth)
    if off <= abs(truth) / 10:
        return 2.0
    return 1.5 if off <= abs(truth) / 5 else -2.5


def number(text):
    """The exact value of a text; None unless it is a finite number. Commas and outer white space are ignored."""
    text = text.replace(",", "").strip()
    if len(text) > MAX_DIGITS or not NUMBER.fullmatch(text):
        return None
    if math.isinf(float(text)):
        return None
    return Fraction(text)


def arithmetic(text):
    """The exact value of an expression of integers, + - * / and parentheses; None if it is not one or is too long."""
    if len(text) > MAX_EXPRESSION or not EXPRESSION.fullmatch(text):
        return None
    try:
        return value_of(syntax_tree(text.strip(), "eval"))
    except (ValueError, KeyError, ZeroDivisionError):
        return None


def value_of(node):
    """The exact value of an expression's syntax tree."""
    match node:
        case ast.Expression(body):
            return value_of(body)
        case ast.Constant(int() as x):
            return Fraction(x)
        case ast.UnaryOp(ast.USub(), operand):
            return -value_of(operand)
        case ast.BinOp(left, operation, right):
            operate = OPERATORS[type(operation).__name__]  # KeyError for ** and //
            return operate(value_of(left), value_of(right))
    raise ValueError("no arithmetic")


def syntax_tree(text, mode):
    """The syntax tree of a model's text; None if it does not parse. mode: "eval" for an expression, "exec" for code"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in the model's text, which the user cannot change
        try:
            return ast.parse(text, mode=mode)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
