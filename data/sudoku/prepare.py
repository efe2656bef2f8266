"""Generates 4x4 sudoku boards for fill-in, or puzzles as prompts.

python data/sudoku/prepare.py                       boards: train.bin, val.bin and meta.json beside this file
python data/sudoku/prepare.py --prompts=20000       puzzles: prompts.jsonl and meta.json in data/sudoku_prompts
python data/sudoku/prepare.py --prompts=20000 --evaluate=FILE.csv    validation prompts from a file of puzzles
--out=FOLDER writes elsewhere, to be used as --dataset=FOLDER.

A board is four lines of four digits: each row, each column and each quarter has 1, 2, 3 and 4. There are 288 boards.
Training masks digits of a board, which makes a puzzle; data/sudoku/reward.py checks the filled board. The 24 boards of
a family, which differ in the names of their digits alone, are all for training or all for validation.
A prompt is "0100040203200043=", 0 for a hidden digit, and its completion the 16 digits of the board that it was made
from; its field `seen` says whether a training board solves it. FILE.csv has the columns Puzzle and Solution.
"""

import csv
import os
import pathlib
import random
import sys
from dataclasses import dataclass
from itertools import permutations, product
from typing import Annotated

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from core.config import load_config
from core.data import write_dataset
from core.errors import Mistake, others, run_script
from core.records import write_prompts
from core.settings.setting import Settings
from core.tokenizer import CharTokenizer

HERE = os.path.dirname(os.path.relpath(__file__))
DIGITS = "1234"
HIDDEN = "0"   # a hidden digit of a prompt
FAMILIES = 12  # of boards that differ in the names of their digits alone


@dataclass(frozen=True)
class SudokuConfig(Settings):
    """The settings of this script: boards as text, or puzzles as prompts."""

    prompts: Annotated[int, "[0, 1e5]"] = 0
        # how many puzzles to write as training prompts; 0: write boards for fill-in
    fewest_hidden: int = 6  # fewest hidden digits of such a puzzle
    most_hidden: int = 12  # most hidden digits
    evaluate: str | None = None
        # a CSV file of puzzles that are the validation prompts; None: a tenth as many as for training, made from the
        # held-out boards
    held_out: int = 3  # how many of the 12 families of boards are for validation
    seed: int = 0  # seed of the choice of these families, and of the puzzles
    out: str | None = None  # the folder of the dataset; None: data/sudoku, for prompts data/sudoku_prompts

    def conflicts(self):
        yield not 1 <= self.held_out < FAMILIES, "held_out", f"must be 1 to {FAMILIES - 1}"
        yield (not 1 <= self.fewest_hidden <= self.most_hidden <= 16, "fewest_hidden most_hidden",
               "fewest_hidden must be at least 1, and most_hidden at least fewest_hidden and at most 16; "
               f"they are {self.fewest_hidden} and {self.most_hidden}")
        yield 0 < self.prompts < 10, "prompts", "must be 10 or more; 0 writes boards for fill-in"
        yield self.evaluate and not self.prompts, "evaluate", "is for prompts; set prompts=20000, or another number"


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


def solutions(puzzle, every):
    """The boards among `every`, texts of 16 digits, that have the given digits of a puzzle."""
    return [board for board in every
            if all(given in (HIDDEN, digit) for given, digit in zip(puzzle, board, strict=True))]


def random_puzzle(rng, board, c):
    """The board with fewest_hidden to most_hidden of its digits hidden, each number of them equally likely."""
    hidden = rng.sample(range(16), rng.randint(c.fewest_hidden, c.most_hidden))
    return "".join(HIDDEN if place in hidden else digit for place, digit in enumerate(board))


def read_puzzles(path, every):
    """The (puzzle, solution) pairs of a CSV file with the columns Puzzle and Solution."""
    if not os.path.isfile(path):
        raise Mistake(f"evaluate={path} does not exist; data/sudoku/README.md says where to download one")
    with others(f"{path} is not a CSV file", "save it as UTF-8"), open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    pairs = [(row.get("Puzzle") or "", row.get("Solution") or "") for row in rows]
    if not pairs:
        raise Mistake(f"{path} has no puzzles")
    for line, (puzzle, solution) in enumerate(pairs, 2):
        if len(puzzle) != 16 or HIDDEN not in puzzle or solution not in solutions(puzzle, every):
            raise Mistake(f"{path}, line {line}: Puzzle={puzzle} must have 16 digits, 0 for a hidden one, and "
                          f"Solution={solution} must be a board that solves it")
    return pairs


def write_puzzles(c, rng, split_boards):
    """Writes puzzles as prompts. A puzzle that is drawn for both splits is a validation prompt alone."""
    train, held_out = (["".join(board) for board in split_boards[split]] for split in ("train", "val"))
    every = train + held_out
    drawn = {"train": [(random_puzzle(rng, board, c), board) for board in rng.choices(train, k=c.prompts)]}
    if c.evaluate:
        drawn["val"] = read_puzzles(c.evaluate, every)
    else:
        drawn["val"] = [(random_puzzle(rng, board, c), board) for board in rng.choices(held_out, k=c.prompts // 10)]
    records = [{"prompt": f"{puzzle}=", "puzzle": puzzle, "answer": board, "completion": board, "split": split,
                "seen": split == "train" or bool(solutions(puzzle, train))}
               for split, pairs in drawn.items() for puzzle, board in pairs]
    val = {record["puzzle"]: record for record in records if record["split"] == "val"}.values()  # each puzzle once
    write_prompts(c.out or f"{HERE}_prompts", records, CharTokenizer(HIDDEN + DIGITS + "=", stop=True),
                  val_with_several_solutions=sum(len(solutions(record["puzzle"], every)) > 1 for record in val),
                  val_answer_is_a_training_board=sum(record["answer"] in train for record in val),
                  val_solved_by_a_training_board=sum(record["seen"] for record in val))


def write_boards(c, split_boards):
    """Writes boards as running text for fill-in."""
    text = {split: "".join("\n".join(board) + "\n" for board in found) for split, found in split_boards.items()}
    tokenizer = CharTokenizer("\n" + DIGITS)
    # A window is followed by one more token: with it the last board can be drawn too
    write_dataset(c.out or HERE, {split: tokenizer.encode(x + "\n") for split, x in text.items()}, tokenizer,
                  stride=len("1234\n" * 4), boards=len(boards()))


def main(argv):
    config, _ = load_config(SudokuConfig, argv)
    rng = random.Random(config.seed)
    held_out = rng.sample(sorted(set(map(family, boards()))), config.held_out)
    split_boards = {"train": [], "val": []}
    for board in boards():
        split_boards["val" if family(board) in held_out else "train"].append(board)
    if config.prompts:
        write_puzzles(config, rng, split_boards)
    else:
        write_boards(config, split_boards)


if __name__ == "__main__":
    run_script(main)
