"""Rewards that check a mathematical answer. A completion is parsed and computed within bounds, never run as code."""

import ast
import math
import operator
import re
import warnings
from fractions import Fraction

from grpo.reward_functions.registry import column, reward

END = "<end_working_out>"
OPEN, CLOSE = "<SOLUTION>", "</SOLUTION>"
TAGS = [END, OPEN, CLOSE]
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
LONG_EXPONENT = re.compile(r"[eE][-+]?\d{4}")
MAX_DIGITS = 100  # characters; a longer text does not count as a number, because exact arithmetic on it is slow
EXPRESSION = re.compile(r"[0-9+\-*/() \t\n]+")
MAX_EXPRESSION = 300           # characters of the text
MAX_NODES, MAX_DEPTH = 200, 50  # of its syntax tree
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@reward(-3, 3)
def math_format(prompts, completions, **columns):
    """3 for text, <end_working_out>, <SOLUTION>..</SOLUTION> and no more; else per tag 0.5 if it occurs once or -1.

    Text and solution must not be blank. Between the tags and after the last one, only white space is allowed.
    """
    return [score_format(text) for text in completions]


@reward(-4.5, 5)
def math_answer(prompts, completions, **columns):
    """Solution vs `answer`: 5 equal, 3.5 stripped, 2 in 10%, 1.5 in 20%, -2.5 further off, -4.5 no number, -2 no block.

    The solution is the text of the only <SOLUTION>..</SOLUTION> block. 5 and 3.5 compare texts: equal numbers in
    different notation (1,000 and 1000, 42.0 and 42) get 2. The distances are shares of |answer|, the limits included,
    so that only 0 is near an answer of 0. If the answer is not a number, only the texts are compared.
    """
    answers = column(math_answer, columns, "answer")
    return [score_answer(solution(text), str(answer)) for text, answer in zip(completions, answers, strict=True)]


@reward(-2.5, 3.5)
def math_number(prompts, completions, **columns):
    """First number in the SOLUTION block against `answer`: 3.5 equal, -1.5 unequal, -2.5 no number or no block."""
    scores = []
    for text, answer in zip(completions, column(math_number, columns, "answer"), strict=True):
        found = NUMBER.search((solution(text) or "").replace(",", ""))
        guess = number(found.group()) if found else None
        if guess is None:
            scores.append(-2.5)
        else:
            scores.append(3.5 if guess == number(str(answer)) else -1.5)
    return scores


@reward(0, 1)
def math_working(prompts, completions, **columns):
    """Share of the equations before <end_working_out>, such as 7+5=12, that are true; 0 if there is none."""
    scores = []
    for text in completions:
        equations = [part for part in re.split("[,;\n]", text.partition(END)[0].partition(">")[2]) if "=" in part]
        true = sum(is_true(equation) for equation in equations)
        scores.append(true / len(equations) if equations and END in text else 0.0)
    return scores


def exact_task(numbers=None, target=None, **columns):
    """(sorted numbers, target) of a countdown record as Fractions. Raises ValueError if they are not numbers."""
    for field, value in (("numbers", numbers), ("target", target)):
        if value is None:
            raise ValueError(f"reward countdown needs the field '{field}' in every record")
    if not isinstance(numbers, (list, tuple)):
        raise ValueError(f"reward countdown: numbers={numbers!r} of a record must be a list of numbers")
    return sorted(exact(x, "numbers", numbers) for x in numbers), exact(target, "target", target)


def exact(x, field, value):
    """A number, or a text that is one, as a Fraction. field, value: what a ValueError names."""
    long = isinstance(x, str) and (len(x) > MAX_DIGITS or LONG_EXPONENT.search(x.replace("_", "")))
    try:
        if not isinstance(x, bool) and not long:  # true of JSON, which Fraction would read as 1
            return Fraction(x)
    except (ValueError, TypeError, ZeroDivisionError, OverflowError):
        pass
    raise ValueError(f"reward countdown: {field}={value!r:.100} of a record: {x!r:.100} is not a number, or has too "
                     "many digits")


@reward(0, 1, check=exact_task)
def countdown(prompts, completions, **columns):
    """1 if the expression uses each of `numbers` exactly once and its value is exactly `target`; else 0.

    The expression is the text of the single SOLUTION block, or else the whole completion, up to the first "=". It may
    have integers, + - * /, unary minus and parentheses.
    Raises ValueError for a record whose `numbers` are not a list of numbers, or whose `target` is not a number.
    """
    scores = []
    numbers, targets = column(countdown, columns, "numbers"), column(countdown, columns, "target")
    for text, given, target in zip(completions, numbers, targets, strict=True):
        block = solution(text)
        used, value = arithmetic((text if block is None else block).partition("=")[0])
        scores.append(float((used, value) == exact_task(given, target)))
    return scores


@reward(0, 1)
def equations(prompts, completions, **columns):
    """Fill-in: of the lines like 12+34=46 of the true text that a mask touches, the share that are true sums.

    Only lines with a line break at both ends count, and a masked line break touches its line. A text in which no line
    is masked is skipped.
    """
    answers, scores = column(equations, columns, "answer"), []
    for prompt, text, truth in zip(prompts, completions, answers, strict=True):
        spans = [(m.start() - 1, m.end() + 1) for m in re.finditer(r"(?<=\n)[^\n]*=[^\n]*(?=\n)", truth)]
        touched = [(a, b) for a, b in spans if prompt[a:b] != truth[a:b]]
        scores.append(sum(is_sum(text[a:b]) for a, b in touched) / len(touched) if touched else None)
    return scores


def score_format(text):
    """The value of math_format for one completion."""
    pieces = re.split("(" + "|".join(TAGS) + ")", text)
    if pieces[1::2] == TAGS:
        filled = [bool(piece.strip()) for piece in pieces[::2]]
        if filled == [True, False, True, False]:  # working-out, nothing, solution, nothing
            return 3.0
    return sum(0.5 if text.count(tag) == 1 else -1.0 for tag in TAGS)


def solution(text):
    """The text of the only <SOLUTION>..</SOLUTION> block; None if there is none, or more than one."""
    if text.count(OPEN) != 1 or text.count(CLOSE) != 1:
        return None
    inside = text.partition(OPEN)[2]
    return inside.partition(CLOSE)[0] if CLOSE in inside else None


def score_answer(block, answer):
    """The value of math_answer for the text of a SOLUTION block; block is None if there is not exactly one."""
    if block is None:
        return -2.0
    if block == answer:
        return 5.0
    if block.strip() == answer.strip():
        return 3.5
    guess, truth = number(block), number(answer)
    if guess is None:
        return -4.5
    if truth is None:
        return -2.5
    off = abs(guess - truth)
    if off <= abs(truth) / 10:
        return 2.0
    return 1.5 if off <= abs(truth) / 5 else -2.5


def is_sum(line):
    """Whether a line between its two line breaks is a+b=c, in plain digits, and true."""
    digits = "(0|[1-9][0-9]{0,17})"
    found = re.fullmatch(rf"\n{digits}\+{digits}={digits}\n", line)
    return found is not None and int(found[1]) + int(found[2]) == int(found[3])


def number(text):
    """The exact value of a text that is a number, without commas and outer white space; None if it is not a number, or
    not a finite one."""
    text = text.replace(",", "").strip()
    if len(text) > MAX_DIGITS or not NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        return None
    return Fraction(text)


def is_true(equation):
    """Whether the left side of an equation, evaluated within bounds, is the number on its right."""
    left, right = equation.split("=", 1)
    value = arithmetic(left)[1]
    return value is not None and value == number(right)


def arithmetic(text):
    """The integers of an expression, sorted, and its exact value; (None, None) if it is not one or is too large."""
    if len(text) > MAX_EXPRESSION or not EXPRESSION.fullmatch(text):
        return None, None
    tree = syntax_tree(text.strip(), "eval")
    if tree is None or not is_small(tree.body):
        return None, None
    nodes = list(ast.walk(tree.body))
    if not all(isinstance(node, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.USub, *OPERATORS)) for node in nodes):
        return None, None
    try:
        return sorted(node.value for node in nodes if isinstance(node, ast.Constant)), value_of(tree.body)
    except ZeroDivisionError:
        return None, None


def is_small(tree):
    """Whether a syntax tree is within MAX_NODES and MAX_DEPTH. It reads no more of the tree than that."""
    level, size = [tree], 0
    for _ in range(MAX_DEPTH):
        size += len(level)
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level or size > MAX_NODES:
            break
    return not level and size <= MAX_NODES


def value_of(node):
    """The exact value of an expression's syntax tree. Raises ZeroDivisionError."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp):
        return -value_of(node.operand)
    return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))


def syntax_tree(text, mode):
    """The syntax tree of a model's text, or None if it has none. mode: "eval" for an expression, "exec" for code"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in the model's text, which the user cannot change
        try:
            return ast.parse(text, mode=mode)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
