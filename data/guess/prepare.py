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
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.errors import run_script
from core.records import write_prompts
from core.settings.setting import Count, Settings
from core.tokenizer import CharTokenizer

HERE = os.path.dirname(os.path.relpath(__file__))

MOST_RANGES = 10**6  # a game of each is written


@dataclass(frozen=True)
class GuessConfig(Settings):
    largest: Count = 99  # largest number
    fewest: int = 8  # numbers in a range, at least
    most: int = 63  # numbers in a range, at most
    seed: int = 0  # seed of the random numbers
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER

    def conflicts(self):
        yield (not 1 <= self.fewest <= self.most <= self.largest, "fewest most largest",
               "fewest must be at least 1, most at least fewest, and largest at least most; "
               f"they are {self.fewest}, {self.most} and {self.largest}")
        ranges = self.largest * (self.most - self.fewest + 1)
        yield (ranges > MOST_RANGES, "largest most fewest",
               f"some {ranges} ranges of {self.fewest} to {self.most} numbers are more than {MOST_RANGES}; lower "
               "largest or most")


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
