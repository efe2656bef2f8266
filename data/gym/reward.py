"""The reward of problems of reasoning-gym: the task's own score of an answer."""

import functools

from core.settings.optional import require
from grpo.rewards import reward


@functools.cache
def scorer(task):
    """The function (answer, entry) -> score of a task."""
    return require("reasoning_gym", f"task={task}", "reasoning-gym").create_dataset(task, size=1, seed=0).score_answer


def answer_in(text):
    """The first line of a completion, without a full stop at its end."""
    return text.strip().split("\n")[0].strip().rstrip(".")


@reward(0, 1)
def gym(prompts, completions, task, entry, **columns):
    """1 if the task counts the completion's first line as right, else 0; also 0 where the task cannot read it."""
    scores = []
    for text, name, problem in zip(completions, task, entry, strict=True):
        try:
            score = scorer(name)(answer_in(text), problem)
        except (ValueError, TypeError, ArithmeticError, LookupError, SyntaxError):  # of some tasks, for untidy answers
            score = 0.0
        scores.append(float(score >= 1.0))
    return scores
