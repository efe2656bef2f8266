"""The scores of reasoning-gym's tasks as a reward."""

import ast
import re

from core.errors import Mistake, others
from core.settings.optional import require
from grpo.reward_functions.verify_math import syntax_tree
from grpo.rewards import reward

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
NOTHING = re.compile(r"|.*\bnanj?\b.*", re.IGNORECASE | re.DOTALL)  # some tasks count it as right
# Tasks whose scorers evaluate the answer as Python, once, or, as sympy does with a text in a formula, twice
LIST_TASKS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
FORMULA_TASKS = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
SCORERS = {}  # {(task, its settings as a text): the function (answer, entry) -> score}
VALUES = (ast.Expression, ast.Load, ast.Constant, ast.List, ast.Tuple)
FORMULAS = (ast.Expression, ast.Load, ast.Constant, ast.Name, ast.Call, ast.BinOp, ast.UnaryOp, ast.operator,
            ast.unaryop)
FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log",
             "ln", "sqrt", "Abs")


@reward(0, 1, slow=True)
def gym(prompts, completions, task, entry, settings, *, log_metric, **columns):
    """The score that the task of a problem gives the answer; 0 if it cannot read it.

    The answer: see answer_in. Logs the mean score of each task, and the share of answers that a task could not read.
    """
    scores = []
    for text, name, problem, of_task in zip(completions, task, entry, settings, strict=True):
        score = score_of(name, answer_in(text, problem["answer"]), problem, of_task)
        log_metric("gym_unread", score is None)
        scores.append(score or 0.0)
        log_metric(f"gym_{name}", scores[-1])
    return scores


def answer_in(text, truth):
    """The part of a completion that a task scores: what stands in its last <answer> block, or else all of it; of that
    the last number, if the record's own answer, `truth`, is a number."""
    blocks = ANSWER.findall(text)
    given = (blocks[-1] if blocks else text).strip()
    if NUMBER.fullmatch(truth or ""):
        return (NUMBER.findall(given) or [""])[-1]
    return given


def score_of(task, answer, entry, settings):
    """The score of an answer, within 0 and 1; None if it is blank or not a number, or the task cannot
    read it, or must not evaluate it. settings: the task's own"""
    if NOTHING.fullmatch(answer):
        return None
    if not is_harmless(task, answer) and answer != entry["answer"]:
        return None
    score_answer = scorer(task, settings)
    try:
        with others(f"{task} cannot read the answer", "it counts as wrong"):
            return min(max(float(score_answer(answer, entry)), 0.0), 1.0)
    except Mistake:
        return None


def scorer(task, settings):
    """The function (answer, entry) -> score of a task with its settings."""
    key = task, repr(settings)
    if key not in SCORERS:
        package = require("reasoning_gym", "reward gym", "reasoning-gym")
        SCORERS[key] = package.create_dataset(task, size=1, seed=0, **settings).score_answer
    return SCORERS[key]


def is_harmless(task, text):
    """True if a task may evaluate a text as Python: a list of values, or a formula, which calls nothing but FUNCTIONS
    and has no texts in it."""
    if task not in (*LIST_TASKS, *FORMULA_TASKS):
        return True
    tree = syntax_tree(text, "eval")
    if tree is None:
        return False
    nodes = list(ast.walk(tree))
    if task in LIST_TASKS:
        return all(isinstance(node, VALUES) for node in nodes)
    return all(map(in_formula, nodes))


def in_formula(node):
    """True for a node of a formula: numbers, names, operators, and calls of FUNCTIONS."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float))
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", None) in FUNCTIONS
    return isinstance(node, FORMULAS)
