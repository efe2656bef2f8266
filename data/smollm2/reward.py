"""The reward of sums: the last number of a completion, which may say more, is the answer."""

import re

from grpo.rewards import reward

NUMBER = re.compile(r"-?[0-9]+")


@reward(0, 1)
def last_number(prompts, completions, answer, **columns):
    """1 if the last whole number of the completion is the record's `answer`; else 0."""
    scores = []
    for text, truth in zip(completions, answer, strict=True):
        numbers = NUMBER.findall(text)
        scores.append(float(bool(numbers) and numbers[-1] == str(truth)))
    return scores
