"""The pictures of the documents show what was measured, and nothing runs in them."""

import pathlib
import re
import runpy
from xml.etree import ElementTree

from tests.docs.test_grpo_in_one_file import loaded
from tests.tiny import ROOT

DOCS = pathlib.Path(ROOT, "docs")
DRAW = loaded("pictures")
units_right = runpy.run_path(f"{ROOT}/data/sudoku/reward.py")["units_right"]


def elements(picture):
    """Those of a picture, as strictly as XML; it holds shapes, text and style alone."""
    found = list(ElementTree.fromstring(picture).iter())
    tags = "svg style g rect path circle text"
    assert {x.tag for x in found} <= {"{http://www.w3.org/2000/svg}" + tag for tag in tags.split()}
    assert not any(name.startswith("on") for x in found for name in x.attrib)
    return found


def boards(picture):
    """[[(digit, class)]] of the cells of each board in a picture; the class is that of a drawn digit, or empty."""
    found, drawn = [[]], ""
    for element in elements(picture):
        kind = element.get("class") or ""
        if kind == "digit":
            found[-1].append((element.text, drawn))
            drawn = ""
        if kind.startswith("drawn"):
            drawn = kind
        if kind == "half":
            found.append([])
    return found[:-1]


def test_the_picture_of_the_objectives_is_what_the_script_draws():
    picture = (DOCS / "objectives.svg").read_text()
    assert picture == DRAW.draw_objectives() and elements(picture)


def test_a_board_has_the_digits_and_passes_of_its_sample():
    cells = [(x, n % 2) for n, x in enumerate("1234\n3412\n4321\n2143\n")]
    picture = DRAW.svg(9, 9, DRAW.draw_board(cells, 0, 0))
    assert boards(picture) == [[(x, ("", "drawn pass1")[n]) for x, n in cells if x != "\n"]]


def test_the_moving_picture_loops_and_a_board_is_red_exactly_where_the_reward_says_that_it_is_wrong():
    picture = (DOCS / "sudoku.svg").read_text()
    assert len(picture) < 40_000 and "infinite" in picture and "prefers-reduced-motion" in picture
    right = []
    for cells in boards(picture):
        text = re.sub("(....)", r"\1\n", "".join(digit for digit, _ in cells))
        right.append(units_right(text, text) == 12)
        assert right[-1] != any("wrong" in kind for _, kind in cells)
    assert len(right) == 8 and sum(right[:4]) < sum(right[4:])
