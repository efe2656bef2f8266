"""The reward of problems of reasoning-gym: the task's own score of an answer."""

import functools
import re

from core.settings.optional import require
from grpo.rewards import reward

NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


@functools.cache
def scorer(task):
    """The function (answer, entry) -> score of a task."""
    return require("reasoning_gym", f"task={task}", "reasoning-gym").create_dataset(task, size=1, seed=0).score_answer


def answer_in(text, answer):
    """What the task is to score: the last number of a completion where the task's own `answer` is a number, or else its
    first line, without a full stop at its end."""
    if NUMBER.fullmatch(answer):
        return (NUMBER.findall(text) or [""])[-1]
    return text.strip().split("\n")[0].strip().rstrip(".")


@reward(0, 1)
def gym(prompts, completions, answer, task, entry, **columns):
    """1 if the task counts the completion's answer as right, else 0; also 0 where the task cannot read it."""
    scores = []
    for text, truth, name, problem in zip(completions, answer, task, entry, strict=True):
        try:
            score = scorer(name)(answer_in(text, truth), problem)
        except (ValueError, TypeError, ArithmeticError, LookupError, SyntaxError):  # of some tasks, for untidy answers
            score = 0.0
        scores.append(float(score >= 1.0))
    return scores
