"""The pictures of the documents show what was measured."""

import json
import pathlib
import re
import runpy
from xml.etree import ElementTree

import pytest

from core.errors import Mistake
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


def test_the_moving_picture_begins_with_whole_boards():
    """As a preview shows it, which is a picture of its first moment."""
    drawn = (DOCS / "sudoku.svg").read_text()
    assert loaded("pictures").style_of_passes() in drawn
    passes = re.findall(r"animation: (\w+) (\d+)s -([\d.]+)s infinite", drawn)
    assert len(passes) == 4
    for name, seconds, first in passes:
        shown, hidden = re.search(rf"@keyframes {name} .* (\d+)%, (\d+)% {{ opacity: 1; }}", drawn).groups()
        assert int(shown) < 100 * float(first) / float(seconds) < int(hidden)


def points(picture, kind):
    """[(x, y)] of each path of a class in a picture."""
    found = []
    for element in ElementTree.fromstring(picture).iter():
        if element.get("class") == kind:
            numbers = re.findall(r"[\d.]+", element.get("d"))
            found.append([*zip(map(float, numbers[::2]), map(float, numbers[1::2]), strict=True)])
    return found


def test_the_picture_of_the_passes_shows_the_means_and_deviations_of_the_seeds_in_the_folders(tmp_path, capsys):
    valid = {("before", 1): (0.40, 0.50), ("before", 4): (0.50, 0.52), ("after", 1): (0.53, 0.55),
             ("after", 4): (0.58, 0.60)}
    for (when, passes), values in valid.items():
        for seed, value in enumerate(values):
            folder = tmp_path / f"{when}-{passes}-{seed}"
            folder.mkdir()
            record = {"step": 0, "eval/word_validity": value, "eval/words_recovered": value - 0.1,
                      "eval/gold_judge": 0.8, "eval/distinct_words": 3.5}
            (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    path = tmp_path / "passes.svg"
    loaded("pictures").main(["passes", str(path), *map(str, sorted(tmp_path.iterdir()))])
    one, four = [line.split("|")[2:4] for line in capsys.readouterr().out.splitlines()[2:4]]
    assert [float(cell.split()[0]) for cell in (*one, *four)] == [0.45, 0.54, 0.51, 0.59]
    (before,), (after,) = points(path.read_text(), "before"), points(path.read_text(), "mean")
    lowest, highest = 0.45 - 0.05 * 2**0.5, 0.59 + 0.01 * 2**0.5  # one standard deviation around the means
    per_pixel = (highest - lowest) / (250 - 40)
    for (_, y), mean in zip((*before, *after), (0.45, 0.51, 0.54, 0.59), strict=True):
        assert 250 - (mean - lowest) / per_pixel == pytest.approx(y, abs=0.1)
    assert [x for x, _ in before] == [x for x, _ in after] == [60, 400]


WHOLE = {"step": 0} | {f"eval/{name}": 0.5 for name in (
    "word_validity", "words_recovered", "gold_judge", "distinct_words")}


@pytest.mark.parametrize("records", [
    {"before-1-1": [WHOLE]},
    {"before-1-1": [WHOLE], "before-4-1": [WHOLE], "after-1-1": [WHOLE]},
    {"notes": [WHOLE]},
    {"before-1-1": [WHOLE], "before-4-1": [WHOLE], "after-4-4-1": [WHOLE]},
    {"before-1-1": [WHOLE], "before-4-1": [WHOLE, WHOLE | {"step": 1}]},
    {"before-1-1": [WHOLE], "before-4-1": [{"step": 0, "eval/word_validity": 0.5}]},
], ids=lambda records: " ".join(records))
def test_other_folders_than_runs_in_passes_are_refused(records, tmp_path):
    for name, lines in records.items():
        (tmp_path / name).mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    with pytest.raises(Mistake):
        loaded("pictures").main(["passes", str(tmp_path / "passes.svg"), *(str(tmp_path / name) for name in records)])
