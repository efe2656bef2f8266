"""A reward that checks an answer in LaTeX with the package math-verify."""

import logging

from core.settings.optional import require
from grpo.reward_functions.registry import reward


@reward(0, 1, slow=True)
def math_verify(prompts, completions, answer, *, log_metric, **columns):
    """1 if the package math-verify finds the completion's formula equal to `answer`; None if it cannot read `answer`.

    The formula is the one in \\boxed{}, or else the last one in $ $, or else the last number. `answer` is LaTeX: bare,
    or a text with such a formula. What takes longer than 5 seconds counts as not equal. Logs the share of answers that
    cannot be read.
    """
    package = require("math_verify", "reward math_verify", "math-verify[antlr4_13_2]")
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would print every formula that takes too long
    scores = []
    for text, truth in zip(completions, map(str, answer), strict=True):
        is_bare = "$" not in truth and "\\boxed" not in truth
        expected = package.parse(f"\\boxed{{{truth}}}" if is_bare else truth)
        log_metric("unread_answers", not expected)
        scores.append(float(package.verify(expected, package.parse(text))) if expected else None)
    return scores
