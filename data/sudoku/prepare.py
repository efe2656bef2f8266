"""Generates 4x4 sudoku boards for fill-in: writes train.bin, val.bin and meta.json beside this file.

python data/sudoku/prepare.py
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

A board is four lines of four digits: each row, each column and each quarter has 1, 2, 3 and 4. There are 288 boards.
Training masks digits of a board, which makes a puzzle; data/sudoku/reward.py checks the filled board. The 24 boards of
a family, which differ in the names of their digits alone, are all for training or all for validation.
"""

import os
import pathlib
import random
import sys
from dataclasses import dataclass
from itertools import permutations, product

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.files.datasets import write_dataset
from core.settings.script import run_script
from core.tokenizer import CharTokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
DIGITS = "1234"
FAMILIES = 12  # of boards that differ in the names of their digits alone


@dataclass(frozen=True)
class SudokuConfig:
    held_out: int = 3      # how many of the 12 families of boards are for validation
    seed: int = 0          # seed of the choice of these families
    out: str = HERE        # the folder of the dataset; another one is used as --dataset=FOLDER

    def __post_init__(self):
        if not 1 <= self.held_out < FAMILIES:
            raise ValueError(f"held_out={self.held_out} must be 1 to {FAMILIES - 1}")


def complete(cells):
    """Tells whether four cells have all digits."""
    return sorted(cells) == list(DIGITS)


def boards():
    """All boards, as tuples of four rows."""
    rows = ["".join(row) for row in permutations(DIGITS)]
    halves = [(a, b) for a, b in product(rows, rows) if complete(a[:2] + b[:2]) and complete(a[2:] + b[2:])]
    return [top + bottom for top, bottom in product(halves, halves)
            if all(map(complete, zip(*top, *bottom, strict=True)))]


def family(board):
    """The board with its digits renamed so that the first row is 1234: the same for all of its family."""
    return "\n".join(board).translate(str.maketrans(board[0], DIGITS))


def main(argv):
    config, _ = load_config(SudokuConfig, argv)
    families = sorted(set(map(family, boards())))
    held_out = random.Random(config.seed).sample(families, config.held_out)
    text = {"train": "", "val": ""}
    for board in boards():
        text["val" if family(board) in held_out else "train"] += "\n".join(board) + "\n"
    tokenizer = CharTokenizer("\n" + DIGITS)
    # A window is followed by one more token: with it the last board can be drawn too
    write_dataset(config.out, {split: tokenizer.encode(x + "\n") for split, x in text.items()}, tokenizer,
                  stride=len("1234\n" * 4), boards=len(boards()))


if __name__ == "__main__":
    run_script(main)
