"""Generates games of guessing a number: writes prompts.jsonl and meta.json beside this file.

python data/guess/prepare.py
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

A prompt is a range, "12-74:". The completion is a game of a player who guesses any number that is still possible, as
data/guess/environment.py answers: "43\\n+58\\n-50\\n". All ranges of 8 to 63 numbers are there.
"""

import os
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import Settings, load_config, setting
from core.errors import Mistake, run_script
from core.records import write_prompts
from core.tokenizer import CharTokenizer

HERE = os.path.dirname(os.path.relpath(__file__))

MOST_RANGES = 10**6  # a game of each is written


class GuessConfig(Settings):
    largest: int = setting(99, "largest number", "[1, 1e6]")
    fewest: int = setting(8, "numbers in a range, at least")
    most: int = setting(63, "numbers in a range, at most")
    seed: int = setting(0, "seed of the random numbers")
    out: str = setting(HERE, "the folder of the dataset; another one is used as --dataset=FOLDER")

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.fewest <= self.most <= self.largest:
            raise Mistake(f"1 <= fewest={self.fewest} <= most={self.most} <= largest={self.largest} must hold")
        if (ranges := self.largest * (self.most - self.fewest + 1)) > MOST_RANGES:
            raise Mistake(f"largest={self.largest} has some {ranges} ranges of fewest={self.fewest} to "
                          f"most={self.most} numbers, more than {MOST_RANGES}; lower largest or most")


def game(rng, low, high):
    """A game of random guesses that are still possible."""
    number, text = rng.randint(low, high), ""
    while True:
        guess = rng.randint(low, high)
        text += f"{guess}\n"
        if guess == number:
            return text
        if guess < number:
            low, text = guess + 1, text + "+"
        else:
            high, text = guess - 1, text + "-"


def main(argv):
    config, _ = load_config(GuessConfig, argv)
    rng = random.Random(config.seed)
    records = []
    for low in range(1, config.largest + 1):
        for high in range(low + config.fewest - 1, min(low + config.most - 1, config.largest) + 1):
            records.append({"prompt": f"{low}-{high}:", "completion": game(rng, low, high)})
    write_prompts(config.out, records, CharTokenizer(stop=True), largest=config.largest, fewest=config.fewest,
                  most=config.most)


if __name__ == "__main__":
    run_script(main)
