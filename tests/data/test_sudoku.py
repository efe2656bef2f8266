"""Sudoku boards: all of them, split without renamings across, drawn whole, and checked exactly."""

import operator
import os
from itertools import permutations

import numpy as np
import pytest

from core.data import load_meta
from core.records import read_records
from grpo.reward_functions.registry import load_reward_file
from tests.data.test_prepare import ids_in, prepare
from tests.tiny import ROOT

BOARD = "1234\n3412\n2143\n4321\n"
SIZE = len(BOARD)


@pytest.fixture
def rewards():
    return load_reward_file(os.path.join(ROOT, "data", "sudoku", "reward.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("sudoku")
    prepare("sudoku").main([f"--out={out}"])
    return out


@pytest.fixture(scope="module")
def boards(folder):
    """{split: the boards of a file, which ends with one more newline}."""
    found = {}
    for split, ids in ids_in(folder).items():
        text = load_meta(folder)[1].decode(ids)
        assert len(text) % SIZE == 1
        found[split] = [text[i : i + SIZE] for i in range(0, len(text) - 1, SIZE)]
    return found


def units_of(k):
    """The row, the column and the quarter of a cell."""
    return k // 4, k % 4, (k // 8, k % 4 // 2)


def every_board(cells=""):
    """All boards, filled cell by cell: a digit may not be in the row, column or quarter of another one like it."""
    if len(cells) == 16:
        return ["\n".join(cells[i : i + 4] for i in range(0, 16, 4)) + "\n"]
    taken = {c for k, c in enumerate(cells) if any(map(operator.eq, units_of(k), units_of(len(cells))))}
    return [board for digit in "1234" if digit not in taken for board in every_board(cells + digit)]


def digits(board):
    """A board of a prompt: 16 digits."""
    return board.replace("\n", "")


def solves(puzzle, board):
    return all(p in ("0", c) for p, c in zip(puzzle, board, strict=True))


def test_the_files_have_every_board_once_and_no_held_out_one_is_a_renaming_of_a_training_board(boards):
    found = boards["train"] + boards["val"]
    assert len(found) == 288 and set(found) == set(every_board()) and len(boards["val"]) == 72
    renamed = {board.translate(str.maketrans("1234", "".join(names))) for board in boards["val"]
               for names in permutations("1234")}
    assert not renamed & set(boards["train"])


@pytest.mark.parametrize("count", [1, 10, 16])
def test_every_solution_of_a_puzzle_is_right_and_every_other_board_is_wrong(rewards, count):
    filled, rng = every_board(), np.random.default_rng(count)
    every = list(map(digits, filled))
    answer, cells = every[rng.integers(288)], rng.choice(16, size=count, replace=False)
    puzzle = "".join("0" if k in cells else c for k, c in enumerate(answer))
    lines = "".join(puzzle[i : i + 4].replace("0", "_") + "\n" for i in range(0, 16, 4))
    right, puzzles = [float(solves(puzzle, board)) for board in every], [puzzle] * 288
    assert rewards["sudoku"]([lines] * 288, filled) == rewards["sudoku_units"]([lines] * 288, filled) == right
    assert rewards["sudoku_board"](every, puzzles) == rewards["sudoku_unseen"](every, puzzles, [False] * 288) == right
    assert rewards["sudoku_unseen"](every, puzzles, [True] * 288) == [None] * 288
    same = [np.mean([board[k] == answer[k] for k in cells]) for board in every]
    assert rewards["sudoku_cells"](every, puzzles, [answer] * 288) == pytest.approx(same)


def test_a_wrong_digit_costs_its_row_its_column_and_its_quarter(rewards):
    for i, digit in enumerate(BOARD):
        if digit != "\n":
            wrong = BOARD[:i] + str(int(digit) % 4 + 1) + BOARD[i + 1 :]
            assert rewards["sudoku"](["____\n" * 4], [wrong]) == [0.0]
            assert rewards["sudoku_units"](["____\n" * 4], [wrong]) == [9 / 12]


def test_a_prompt_is_a_puzzle_of_its_answer_and_the_answers_of_validation_are_held_out_boards(tmp_path, boards):
    prepare("sudoku").main(["--prompts=2000", f"--out={tmp_path}"])
    records = read_records(str(tmp_path / "prompts.jsonl"))
    prompts = {split: {r["prompt"] for r in records if r["split"] == split} for split in ("train", "val")}
    assert len(prompts["val"]) == 200 and not prompts["val"] & prompts["train"]
    for r in records:
        assert r["answer"] in map(digits, boards[r["split"]])
        assert r["prompt"] == r["puzzle"] + "=" and solves(r["puzzle"], r["answer"])
        assert r["seen"] == any(solves(r["puzzle"], digits(board)) for board in boards["train"])
