"""The pictures of the documents show what was measured, and nothing runs in them."""

import pathlib
import re
import runpy
from xml.etree import ElementTree

from tests.tiny import ROOT

DOCS = pathlib.Path(ROOT, "docs")
DRAW = runpy.run_path(str(DOCS / "pictures.py"))
units_right = runpy.run_path(f"{ROOT}/data/sudoku/reward.py")["units_right"]


def elements(picture):
    """Those of a picture, as strictly as XML; it holds shapes, text and style alone."""
    root = ElementTree.fromstring(picture)
    for element in root.iter():
        element.tag = element.tag.split("}")[1]
        assert element.tag in ("svg", "style", "g", "rect", "path", "circle", "text")
        assert not any("href" in name or name.startswith("on") for name in element.attrib)
    return root


def boards(picture):
    """[[(digit, pass that drew it or 0, whether it is red)]] of the cells of each board in a picture."""
    found, cells = [], []
    for element in elements(picture):
        kind = element.get("class") or ""
        if element.tag == "g" or kind == "digit":
            cells.append(("".join(element.itertext()).strip(), int(kind[-1]) if element.tag == "g" else 0, "wrong" in kind))
        if kind == "half":
            found.append(cells)
            cells = []
    return found


def test_the_objectives_are_those_of_the_tables():
    picture = (DOCS / "objectives.svg").read_text()
    assert picture == DRAW["draw_objectives"]()
    results = (DOCS / "results.md").read_text().split("## The zoo on two tasks")[1]
    for panel, (_, before) in enumerate(DRAW["TASKS"]):
        rows = re.findall(rf"^\| (\S+) \| {before} \| (\S+) ± (\S+) \|", results, re.M)
        assert {name: found[panel] for name, found in DRAW["OBJECTIVES"].items()} == {
            name: (float(mean), float(sd)) for name, mean, sd in rows}
    assert len([x for x in elements(picture) if x.tag == "circle"]) == 20


def test_a_board_has_the_digits_and_passes_of_its_sample():
    cells = [(x, n % 5) for n, x in enumerate("1234\n3412\n4321\n2143\n")]
    (found,) = boards(DRAW["svg"](9, 9, DRAW["draw_board"](cells, 0, 0)))
    assert found == [(*cell, False) for cell in cells if cell[0] != "\n"]


def test_the_moving_picture_loops_and_a_board_is_red_exactly_where_the_reward_says_that_it_is_wrong():
    picture = (DOCS / "sudoku.svg").read_text()
    assert len(picture) < 40_000 and "infinite" in picture and "prefers-reduced-motion" in picture
    right = []
    for cells in boards(picture):
        puzzle, text = ("".join(x + "\n" * (n % 4 == 3) for n, x in enumerate(row)) for row in zip(
            *[("_" if turn else digit, digit) for digit, turn, _ in cells], strict=True))
        assert {turn for _, turn, _ in cells} == set(range(5))
        right.append(units_right(puzzle, text) == 12)
        assert right[-1] != any(red for *_, red in cells)
    assert len(right) == 8 and sum(right[:4]) < sum(right[4:])
