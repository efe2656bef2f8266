"""The reward of GSM8K and data in its form, whose answers end in "#### 42"."""

import re
from decimal import Decimal

from grpo.rewards import reward

BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")  # with one level of braces in it
NUMBER = re.compile(r"(?<![0-9.])-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")


def last_number(text):
    """The exact value of the last number of a text; None if it has none."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


@reward(0, 1)
def gsm8k(prompts, completions, answer, **columns):
    """1 if the last number of the completion's last \\boxed{}, or else of the completion, is that behind ####."""
    scores = []
    for text, truth in zip(completions, answer, strict=True):
        boxes = BOXED.findall(text)
        found = last_number(boxes[-1] if boxes else text)
        scores.append(float(found is not None and found == last_number(str(truth).rpartition("####")[2])))
    return scores
