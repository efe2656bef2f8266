"""Generates lines of sums for fill-in: writes train.bin, val.bin and meta.json beside this file.

python data/equations/prepare.py                     lines like 3+9=12, with numbers up to 9
python data/equations/prepare.py --largest=99 --copies=3
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

If characters of such a line are masked, several ways to fill them in may give a true sum, and all of them are correct.
So this is a fill-in task with an exact checker, data/equations/reward.py. A hash of a line decides whether it is for
training or for validation.
"""

import os
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import Settings, load_config, setting
from core.data_folder import write_dataset
from core.errors import Mistake, run_script
from core.records import side
from core.tokenizer import CharTokenizer

HERE = os.path.dirname(os.path.relpath(__file__))

MOST_LINES = 10**7


class EquationsConfig(Settings):
    largest: int = setting(9, "the largest number that is added", "[9, 1e6]")
    copies: int = setting(300, "how often each line occurs, at random places in the text", "[1, 1e6]")
    seed: int = setting(0, "seed of the order of the lines")
    out: str = setting(HERE, "the folder of the dataset; another one is used as --dataset=FOLDER")

    def __post_init__(self):
        super().__post_init__()
        if (lines := (self.largest + 1) ** 2 * self.copies) > MOST_LINES:
            raise Mistake(f"largest={self.largest} and copies={self.copies} make {lines} lines, more than "
                          f"{MOST_LINES}; lower one of them")


def main(argv):
    config, _ = load_config(EquationsConfig, argv)
    rng, tokenizer = random.Random(config.seed), CharTokenizer()
    numbers = range(config.largest + 1)
    lines = [f"{a}+{b}={a + b}\n" for a in numbers for b in numbers] * config.copies
    rng.shuffle(lines)
    text = {split: "".join(line for line in lines if side(line) == split) for split in ("train", "val")}
    write_dataset(config.out, {split: tokenizer.encode(x) for split, x in text.items()}, tokenizer,
                  lines=len(lines))


if __name__ == "__main__":
    run_script(main)
