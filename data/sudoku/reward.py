"""The rewards of filled sudoku boards: `sudoku`, exact, and `sudoku_units`, which also counts what is partly right.

A board is four lines of four digits. It is right if each row, each column and each quarter has 1, 2, 3 and 4. A puzzle
may have several such boards: each of them that keeps the given digits is right.
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
