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
from dataclasses import dataclass
from typing import Annotated

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.data import write_dataset
from core.errors import run_script
from core.records import split_of
from core.settings.setting import Count, Settings
from core.tokenizer import CharTokenizer

HERE = os.path.dirname(os.path.relpath(__file__))

MOST_LINES = 10**7


@dataclass(frozen=True)
class EquationsConfig(Settings):
    largest: Annotated[int, "[9, 1e6]"] = 9  # the largest number that is added
    copies: Count = 300  # how often each line occurs, at random places in the text
    seed: int = 0  # seed of the order of the lines
    out: str = HERE  # the folder of the dataset; another one is used as --dataset=FOLDER

    def conflicts(self):
        lines = (self.largest + 1) ** 2 * self.copies
        yield (lines > MOST_LINES, "largest copies",
               f"{lines} lines, (largest + 1)^2 * copies, are more than {MOST_LINES}; lower one of them")


def main(argv):
    config, _ = load_config(EquationsConfig, argv)
    rng, tokenizer = random.Random(config.seed), CharTokenizer()
    numbers = range(config.largest + 1)
    lines = [f"{a}+{b}={a + b}\n" for a in numbers for b in numbers] * config.copies
    rng.shuffle(lines)
    text = {split: "".join(line for line in lines if split_of(line) == split) for split in ("train", "val")}
    write_dataset(config.out, {split: tokenizer.encode(x) for split, x in text.items()}, tokenizer,
                  lines=len(lines))


if __name__ == "__main__":
    run_script(main)
