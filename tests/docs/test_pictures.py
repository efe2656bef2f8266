"""The pictures of the documents show what was measured."""

import pathlib
import re
import runpy
from xml.etree import ElementTree

from tests.docs.test_grpo_in_one_file import loaded
from tests.tiny import ROOT

DOCS = pathlib.Path(ROOT, "docs")
units_right = runpy.run_path(f"{ROOT}/data/sudoku/reward.py")["units_right"]


def boards(picture):
    """[[(digit, class)]] of the cells of each board in a picture; the class is that of a drawn digit, or empty."""
    found, drawn = [[]], ""
    for element in ElementTree.fromstring(picture).iter():
        kind = element.get("class") or ""
        if kind == "digit":
            found[-1].append((element.text, drawn))
            drawn = ""
        if kind.startswith("drawn"):
            drawn = kind
        if kind == "half":
            found.append([])
    return found[:-1]


def test_the_picture_of_the_objectives_is_drawn_from_its_table():
    assert (DOCS / "objectives.svg").read_text() == loaded("pictures").draw_objectives()


def test_a_board_of_the_moving_picture_is_red_exactly_where_the_reward_says_that_it_is_wrong():
    right = []
    for cells in boards((DOCS / "sudoku.svg").read_text()):
        text = re.sub("(....)", r"\1\n", "".join(digit for digit, _ in cells))
        right.append(units_right(text, text) == 12)
        assert right[-1] != any("wrong" in kind for _, kind in cells)
    assert len(right) == 8 and sum(right[:4]) < sum(right[4:])
