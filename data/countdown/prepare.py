"""Generates Countdown problems: writes prompts.jsonl and meta.json beside this file.

In a problem, every given number is used exactly once, with + - * /, to reach a target.

python data/countdown/prepare.py                     3 numbers of 1 to 50, targets of 1 to 100
python data/countdown/prepare.py --numbers=4 --largest=20 --problems=20000
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

A prompt is "3 7 25:82=", and its completion is "25*3+7". Every expression that reaches the target is correct; the
record has the one from which the problem was made.
"""

import os
import pathlib
import random
import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import Mistake, run_script
from core.records import unique_prompts, write_prompts
from core.settings.setting import Count, Settings
from core.tokenizer import named_tokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
MOST_TRIES = 30_000  # expressions for one problem
STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclass(frozen=True)
class CountdownConfig(Settings):
    """The settings of this script: which puzzles, and how many."""

    numbers: Annotated[int, "[2, 6]"] = 3  # how many numbers a problem has, each used once
    smallest: Count = 1  # smallest number
    largest: Count = 50  # largest number
    target_largest: Annotated[int, "[1, 1e9]"] = 100  # largest target
    problems: Annotated[int, "[20, 1e6]"] = 100000  # number of problems; a tenth of them is for validation
    tokenizer: str = "char"  # char, gpt2 or cl100k_base
    seed: int = 0  # seed of the random numbers
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER

    def conflicts(self):
        yield (self.smallest > self.largest, "smallest largest",
               f"smallest must be at most largest, and {self.smallest} is above {self.largest}; change one")


def combine(a, b, operator):
    """Joins two (value, text, strength) by an operator, with as few parentheses as possible; None for x / 0.

    strength: how strongly the outermost operator of the text binds, from STRENGTH; a number binds strongest.
    """
    (x, left, p), (y, right, q) = a, b
    if operator == "/" and y == 0:
        return None
    strength = STRENGTH[operator]
    left = f"({left})" if p < strength else left
    right = f"({right})" if q < strength or (q == strength and operator in "-/") else right
    value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else 0}[operator]
    return value, f"{left}{operator}{right}", strength


def random_expression(rng, numbers):
    """(value, text) of a random expression that uses every number once; (None, "") if it divides by zero."""
    parts = [(Fraction(n), str(n), 3) for n in numbers]
    while len(parts) > 1:
        a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        joined = combine(a, b, rng.choice("+-*/"))
        if joined is None:
            return None, ""
        parts.append(joined)
    return parts[0][0], parts[0][1]


def problem(rng, c):
    """A record made from a random expression: its value, a whole number from 1 to target_largest, is the target.
    Raises Mistake if no expression has such a value."""
    for _ in range(MOST_TRIES):
        numbers = [rng.randint(c.smallest, c.largest) for _ in range(c.numbers)]
        value, text = random_expression(rng, numbers)
        if value is not None and value.denominator == 1 and 1 <= value <= c.target_largest:
            target = int(value)
            return {"prompt": f"{' '.join(map(str, sorted(numbers)))}:{target}=", "numbers": sorted(numbers),
                    "target": target, "answer": text, "completion": text}
    raise Mistake(f"target_largest={c.target_largest}: none of {MOST_TRIES} expressions of {c.numbers} numbers from "
                  f"smallest={c.smallest} to largest={c.largest} has a value from 1 to that; raise target_largest")


def main(argv):
    config, _ = load_config(CountdownConfig, argv)
    rng = random.Random(config.seed)
    records = [problem(rng, config) for _ in range(config.problems)]
    write_prompts(config.out, unique_prompts(records), named_tokenizer(config.tokenizer), numbers=config.numbers,
                  largest=config.largest, target_largest=config.target_largest)


if __name__ == "__main__":
    run_script(main)
