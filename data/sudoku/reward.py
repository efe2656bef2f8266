"""The rewards of sudoku boards. A puzzle may have several solutions: each board that keeps the given digits is right.

Boards filled in, four lines of four digits: `sudoku`, exact; `sudoku_units`, which also counts what is partly right.
Boards written behind a prompt, 16 digits: `sudoku_board`, exact; `sudoku_unseen`, the same for puzzles that no training
board solves; and `sudoku_cells`, which compares with the one stored solution.
"""

from grpo.rewards import reward

ROWS = [[(i, j) for j in range(4)] for i in range(4)]
COLUMNS = [[(i, j) for i in range(4)] for j in range(4)]
QUARTERS = [[(i + a, j + b) for a in range(2) for b in range(2)] for i in (0, 2) for j in (0, 2)]
UNITS = ROWS + COLUMNS + QUARTERS  # of a board, each of four cells


def units_right(puzzle, text):
    """Counts the units of a board, of 12, that have 1, 2, 3 and 4; 0 for a text that is no board of this puzzle."""
    lines = text.split("\n")
    if list(map(len, lines)) != [4, 4, 4, 4, 0] or len(puzzle) != len(text):
        return 0
    if any(given not in (cell, "_") for given, cell in zip(puzzle, text, strict=True)):
        return 0
    return sum(sorted(lines[i][j] for i, j in unit) == list("1234") for unit in UNITS)


@reward(0, 1)
def sudoku(prompts, completions):
    """Fill-in: 1 for a board that keeps the given digits and has 1, 2, 3 and 4 in every row, column and quarter."""
    return [float(units_right(puzzle, text) == len(UNITS))
            for puzzle, text in zip(prompts, completions, strict=True)]


@reward(0, 1)
def sudoku_units(prompts, completions):
    """Fill-in: the share of the 12 rows, columns and quarters that have 1, 2, 3 and 4."""
    return [units_right(puzzle, text) / len(UNITS) for puzzle, text in zip(prompts, completions, strict=True)]


def is_right(puzzle, text):
    """Tells whether a text of 16 digits solves a puzzle of 16 digits, where 0 is a hidden one."""
    lines = ["".join(cells[i : i + 4] + "\n" for i in range(0, len(cells), 4)) for cells in (puzzle, text)]
    return units_right(lines[0].replace("0", "_"), lines[1]) == len(UNITS)


@reward(0, 1)
def sudoku_board(completions, puzzle):
    """Prompts: 1 for 16 digits that keep the given ones and have 1, 2, 3 and 4 in every row, column and quarter."""
    return [float(is_right(given, text)) for given, text in zip(puzzle, completions, strict=True)]


@reward(0, 1)
def sudoku_unseen(completions, puzzle, seen):
    """sudoku_board of the puzzles that no training board solves; the others are skipped."""
    return [None if known else float(is_right(given, text))
            for given, text, known in zip(puzzle, completions, seen, strict=True)]


@reward(0, 1)
def sudoku_cells(completions, puzzle, answer):
    """Prompts: the share of the hidden digits that are as in the stored solution, as d1 counts (arXiv 2504.12216). A
    board that is right but another solution loses; given digits do not count."""
    scores = []
    for given, text, board in zip(puzzle, completions, answer, strict=True):
        hidden = [place for place, digit in enumerate(given) if digit == "0"]
        same = sum(text[place : place + 1] == board[place] for place in hidden)
        scores.append(same / len(hidden))
    return scores
