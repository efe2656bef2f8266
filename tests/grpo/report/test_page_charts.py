"""Charts as inline SVG: what is drawn is what was logged."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from grpo.report.page import BOTTOM, LEFT, RIGHT, TOP, chart, text, ticks


def svg_of(figure):
    return ElementTree.fromstring(figure).find("svg")


def line_of(svg):
    """The path of the curve, and [(x, y)] of its points."""
    path = svg.find("path[@class='line']").get("d")
    return path, [tuple(map(float, pair)) for pair in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path)]


def scales(svg):
    """(x -> step, y -> number), from two labels of each axis."""
    marks = {"x": [], "y": []}
    for label in svg.findall("text")[1:]:  # the first names the axis
        side = label.get("class") or "x"
        marks[side].append((float(label.get(side)), float(label.text)))

    def scale(found):
        (a, low), (b, high) = found[0], found[-1]
        return lambda place: low + (place - a) / (b - a) * (high - low)
    return scale(marks["x"]), scale(marks["y"])


@pytest.mark.parametrize("numbers", [[0.1, 0.9, 0.4, 0.5], [-3e-5, 2e-5, 0.0, 1e-5], [20000.0, 12000.5, 17000.0, 1.5e4],
                                     [5.0] * 4, [0.0] * 4])
def test_a_point_is_where_the_labels_of_the_axes_say(numbers):
    points = list(zip((0, 100, 250, 320), numbers, strict=True))
    svg = svg_of(chart("x", 320, points))
    step_at, number_at = scales(svg)
    _, found = line_of(svg)
    span = (max(numbers) - min(numbers)) or abs(numbers[0]) or 1.0
    assert [step_at(x) for x, _ in found] == pytest.approx([step for step, _ in points], abs=1)
    assert [number_at(y) for _, y in found] == pytest.approx(numbers, abs=span / 100)
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in found)


def test_what_is_not_finite_is_a_gap_and_a_mark_on_the_axis():
    svg = svg_of(chart("x", 5, [(1, None), (2, 1.0), (3, 2.0), (4, None), (5, 3.0)]))
    assert re.sub("[^ML]", "", line_of(svg)[0]) == "MLM"
    assert [round(scales(svg)[0](float(dot.get("cx")))) for dot in svg.findall("circle")] == [1, 4]
    alone = chart("<b>&", 5, [(1, None)])
    assert line_of(svg_of(alone))[0] == "" and "&lt;b&gt;&amp; <b>not finite</b>" in alone


@pytest.mark.parametrize("low, high", [(0, 1), (0, 320), (-1, 1), (0.3, 0.6), (-2.7e-7, 1.9e-6), (12345.6, 12345.7)])
def test_ticks_are_round_numbers_within_the_axis(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 6 and low - 1e-9 <= found[0] and found[-1] <= high + 1e-9
    size = f"{found[1] - found[0]:.0e}"
    assert size[0] in "125" and np.allclose(np.diff(found), float(size))


def test_text_has_no_characters_that_nobody_sees():
    assert text("a\u202eb\u200bc\ufeff\ud800") == "a\ufffdb\ufffdc\ufffd\ufffd" and text("é 漢 🙂") == "é 漢 🙂"
    assert text("a\x00\x1b[1m\r\n\t\x7f\x85b") == "a\ufffd\ufffd[1m\ufffd\n\t\ufffd\ufffdb"
