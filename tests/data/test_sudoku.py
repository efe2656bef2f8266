"""Sudoku boards: all of them, split without renamings across, drawn whole, and checked exactly."""

import json
import operator
import os
from itertools import permutations

import numpy as np
import pytest

from core.dataset_consumer import DatasetConsumer
from core.model import MASKED_FILL
from core.tokenizer import load_meta
from grpo.reward_functions.registry import REWARDS, load_reward_file
from tests.data.test_prepare import ids_in, prepare
from tests.tiny import ROOT, run_here

BOARD = "1234\n3412\n2143\n4321\n"
SIZE = len(BOARD)


@pytest.fixture
def rewards():
    load_reward_file(os.path.join(ROOT, "data", "sudoku", "reward.py"))
    return {name: REWARDS[name].fn for name in ("sudoku", "sudoku_units")}


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


def hide(board, cells):
    """A puzzle: the board with some of its 16 digits as underscores."""
    places = [i for i, c in enumerate(board) if c != "\n"]
    return "".join("_" if i in {places[k] for k in cells} else c for i, c in enumerate(board))


def test_the_files_have_every_board_once_and_no_held_out_one_is_a_renaming_of_a_training_board(boards):
    found = boards["train"] + boards["val"]
    assert len(found) == 288 and set(found) == set(every_board()) and len(boards["val"]) == 72
    renamed = {board.translate(str.maketrans("1234", "".join(names))) for board in boards["val"]
               for names in permutations("1234")}
    assert not renamed & set(boards["train"])


def test_a_problem_is_a_whole_board_whose_newlines_are_visible(folder, boards):
    data = DatasetConsumer(str(folder), MASKED_FILL, SIZE, 64, masks={"in_lines": 1.0}, mask_low=0.4, mask_high=0.6)
    drawn = set()
    for step in range(40):
        batch = data.batch("val", step)
        drawn |= {data.tokenizer.decode(row) for row in batch["target"].tolist()}
        assert not batch["mask"][batch["target"] == data.tokenizer.newline_token_id].any()
        assert set(batch["mask"].sum(1)) <= set(range(8, 13))
    assert drawn == set(boards["val"]), "each board is drawn, the last one too"


@pytest.mark.parametrize("count", [0, 10, 16])
def test_every_solution_of_a_puzzle_is_right_and_every_other_board_is_wrong(rewards, count):
    every, rng = every_board(), np.random.default_rng(0)
    puzzle = hide(every[rng.integers(288)], rng.choice(16, size=count, replace=False))
    solves = [float(all(p in ("_", c) for p, c in zip(puzzle, board, strict=True))) for board in every]
    for name in rewards:
        assert rewards[name]([puzzle] * 288, every) == solves


def test_the_boards_in_the_readme_are_wrong_before_and_right_after(rewards):
    with open(os.path.join(ROOT, "README.md")) as f:
        rows = [line.replace("before", "").replace("after", "").split() for line in f]
    rows = [row for row in rows if len(row) == 10 and all(len(x) == 4 and set(x) <= set("1234_") for x in row)]
    first, before, last, after = ("".join(row[i] + "\n" for row in rows) for i in (0, 4, 5, 9))
    assert len(rows) == 4 and first == last
    assert rewards["sudoku"]([first, first], [before, after]) == [0, 1]


def test_a_wrong_digit_costs_its_row_its_column_and_its_quarter(rewards):
    for i, digit in enumerate(BOARD):
        for other in set("1234") - {digit} if digit != "\n" else ():
            wrong = BOARD[:i] + other + BOARD[i + 1 :]
            assert rewards["sudoku"]([hide(BOARD, range(16))], [wrong]) == [0.0]
            assert rewards["sudoku_units"]([hide(BOARD, range(16))], [wrong]) == [9 / 12]
    rows_alone = "1234\n1234\n1234\n1234\n"
    assert rewards["sudoku_units"]([hide(BOARD, range(16))], [rows_alone]) == [4 / 12]


@pytest.mark.parametrize("text", ["", BOARD[:-1], BOARD + "1", BOARD.replace("\n", "1"), "1" * SIZE,
                                  BOARD.replace("4", "5")])
def test_what_is_no_board_earns_nothing(rewards, text):
    assert [rewards[name]([hide(BOARD, range(16))], [text]) for name in rewards] == [[0.0], [0.0]]


def test_both_splits_have_boards(tmp_path):
    with pytest.raises(ValueError, match="held_out=12 must be 1 to 11"):
        prepare("sudoku").main(["--held_out=12", f"--out={tmp_path}/d"])


@pytest.mark.slow
def test_the_shipped_generator_solves_a_part_of_the_puzzles_and_a_run_starts_from_it(folder, tmp_path):
    done = run_here("grpo/train_grpo.py", "config/grpo_sudoku.py", f"--dataset={folder}", "--max_iters=1",
                    "--batch_size=2", f"--out_dir={tmp_path}/out", "--device=cpu")
    assert done.returncode == 0, done.stderr
    first = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().split("\n")[0])
    assert 0.2 < first["eval/reward/sudoku"] < 0.5 and first["eval/reward/sudoku_units"] > 0.6
    assert "1 x sudoku [0, 1], 1 x sudoku_units [0, 1]" in done.stdout
