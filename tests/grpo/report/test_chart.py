"""Charts as inline SVG: what is drawn is what was logged."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from grpo.report import chart as report_chart
from grpo.report.chart import BOTTOM, LEFT, MOST, RIGHT, TOP, chart, text, ticks


def svg_of(figure):
    return ElementTree.fromstring(figure).find("svg")


def places(path):
    """[(x, y)] of the points of a path."""
    return [tuple(map(float, pair)) for pair in re.findall(r"[ML]([-\d.]+) ([-\d.]+)", path.get("d"))]


def scales(svg):
    """(x -> step, y -> number), from two labels of each axis."""
    marks = {label.get("class"): [] for label in svg.findall("text")}
    for label in svg.findall("text"):
        side = "x" if label.get("class") is None else "y"
        marks[label.get("class")].append((float(label.get(side)), float(label.text)))

    def scale(first, second):
        (a, low), (b, high) = first, second
        return lambda place: low + (place - a) / (b - a) * (high - low)
    return [scale(found[0], found[-1]) for found in (marks[None], marks["y"])]


@pytest.mark.parametrize("numbers", [[0.1, 0.9, 0.4, 0.5], [-3e-5, 2e-5, 0.0, 1e-5], [-1.0, -1.0, -7.0, -2.0],
                                     [20000.0, 12000.5, 17000.0, 15000.0], [5.0] * 4, [0.0] * 4])
def test_a_point_is_where_the_labels_of_the_axes_say(numbers):
    points = list(zip((0, 100, 250, 320), numbers, strict=True))
    svg = svg_of(chart("x", 320, [(0, "", points)]))
    step_at, number_at = scales(svg)
    found = places(svg.find("g/path"))
    span = (max(numbers) - min(numbers)) or abs(numbers[0]) or 1.0
    assert [step_at(x) for x, _ in found] == pytest.approx([step for step, _ in points], abs=1)
    assert [number_at(y) for _, y in found] == pytest.approx(numbers, abs=span / 100)
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in found)


@pytest.mark.parametrize("numbers, least, most", [
    ([-3e-9, 2e-9, 0.0, 1e-9], 0, 0.01), ([0.5, 0.5 + 1e-8, 0.5 - 1e-8], 0, 0.01), ([1e6, 1e6 + 1], 0, 0.01),
    ([1e-7, 1e-6, 1e-7], 0.8, 1)])
def test_rounding_does_not_fill_the_height_but_a_small_learning_rate_does(numbers, least, most):
    svg = svg_of(chart("x", 320, [(0, "", list(enumerate(numbers)))]))
    heights = [y for _, y in places(svg.find("g/path"))]
    assert least <= (max(heights) - min(heights)) / (BOTTOM - TOP) <= most
    assert len([label for label in svg.findall("text") if label.get("class") == "y"]) >= 2


def test_the_caption_has_every_step_and_number_and_shows_the_last():
    figure = ElementTree.fromstring(chart("loss", 3, [(0, "a", [(1, 0.123456), (3, 4e-10)]), (9, "b", [(2, 12345.6)])]))
    a, b = figure.findall("figcaption/span")
    assert (a.get("class"), b.get("class")) == ("c0", "c1") and a.text == "a "
    assert (a[0].get("data-steps"), a[0].get("data-values"), a[0].text) == ("1,3", "0.12346,4e-10", "4e-10")
    assert (b[0].get("data-steps"), b[0].get("data-values"), b[0].text) == ("2", "12346", "12346")
    assert figure.find("svg").get("data-plot") == f"{LEFT} {RIGHT} {BOTTOM} 3"


def test_what_is_not_finite_is_a_gap_and_a_mark_on_the_axis():
    figure = chart("x", 5, [(0, "", [(1, None), (2, 1.0), (3, 2.0), (4, None), (5, 3.0)])])
    svg = svg_of(figure)
    assert re.sub("[^ML]", "", svg.find("g/path").get("d")) == "MLM"
    missing = [dot for dot in svg.findall("g/circle") if dot.get("class") == "missing"]
    step_at, _ = scales(svg)
    assert [round(step_at(float(dot.get("cx")))) for dot in missing] == [1, 4]
    assert {float(dot.get("cy")) for dot in missing} == {BOTTOM}
    assert 'data-values="not finite,1,2,not finite,3"' in figure
    assert svg_of(chart("x", 5, [(0, "", [(1, None)])])).find("g/path").get("d") == ""


def test_stacked_areas_end_where_the_next_begins_and_the_caption_has_their_own_numbers():
    lines = [(0, "a", [(1, 1.0), (2, 3.0)]), (1, "b", [(1, 2.0), (2, 1.0)])]
    svg = svg_of(chart("t", 2, lines, stacked=True))
    _, number_at = scales(svg)
    tops = {g.get("class"): [round(number_at(y), 1) for _, y in places(g.find("path"))] for g in svg.findall("g")}
    assert tops == {"c1": [3.0, 4.0], "c0": [1.0, 3.0]}
    assert list(tops) == ["c1", "c0"], "the lower area is drawn over the higher one"
    ends = re.compile(f"^M{LEFT + 132}.0 .*L{RIGHT}.0 .*V{BOTTOM}H{LEFT + 132}.0Z$")
    assert all(ends.search(g.find("path").get("d")) for g in svg.findall("g"))
    assert 'data-values="2,1"' in chart("t", 2, lines, stacked=True)


@pytest.mark.parametrize("numbers", [[1e308, -1e308], [0.0, 5e-324], [5e-324, -5e-324], [1.7e308, 1.7e308],
                                     [1e-300, 2e-300], [1e-310, 1.0], [-1e308, 0.0, 1e308], [MOST, 1e307]])
@pytest.mark.parametrize("stacked", [False, True])
def test_numbers_of_any_size_are_drawn_within_the_picture(numbers, stacked):
    points = list(enumerate(numbers))
    figure = chart("x", len(numbers) - 1, [(0, "", points), (1, "", points)][: 1 + stacked], stacked)
    for path in svg_of(figure).findall("g/path"):
        assert len(places(path)) == len(numbers) and all(TOP <= y <= BOTTOM for _, y in places(path))
    labels = [float(label.text) for label in svg_of(figure).findall("text") if label.get("class") == "y"]
    assert 2 <= len(labels) <= 6 and np.isfinite(labels).all()
    assert f'data-values="{",".join(f"{y:.5g}" for y in numbers)}"' in figure, "the caption has the numbers themselves"


def test_a_few_points_are_shown_as_dots_and_many_are_not():
    count = lambda n: len(svg_of(chart("x", n, [(0, "", [(i, i / n) for i in range(n)])])).findall("g/circle"))
    assert count(report_chart.DOTS) == report_chart.DOTS and count(report_chart.DOTS + 1) == 0


def test_lines_beside_each_other_are_smoothed():
    points = [(step, float(step % 2)) for step in range(600)]
    alone, beside = (chart("x", 600, [(i, "", points) for i in range(n)]) for n in (1, 2))
    assert {y for _, y in places(svg_of(alone).find("g/path"))} == {TOP, BOTTOM}
    assert len(places(svg_of(beside).find("g/path"))) == 60 and 'data-values="0.5,0.5' in beside


def test_ticks_are_round_numbers_within_the_axis():
    rng = np.random.default_rng(0)
    ranges = [(low, low + 10.0**power * width) for low, power, width in zip(
        rng.normal(size=300), rng.integers(-6, 9, 300), rng.uniform(1, 10, 300), strict=True)]
    for low, high in [*ranges, (0, 1), (0, 320), (-1, 1), (0.3, 0.6)]:
        found = ticks(low, high)
        assert 2 <= len(found) <= 6 and low - 1e-9 <= found[0] and found[-1] <= high + 1e-9
        size = f"{found[1] - found[0]:.0e}"
        assert size[0] in "125" and np.allclose(np.diff(found), float(size))


def test_titles_and_labels_are_escaped():
    figure = ElementTree.fromstring(chart("<b>&", 1, [(0, '"<i>', [(1, 1.0)])]))
    assert figure.find("figcaption").text == "<b>& " and figure.find("figcaption/span").text == '"<i> '
    assert figure.find("svg").get("aria-label") == "<b>&"


def test_text_has_no_characters_that_nobody_sees():
    assert text("a\u202eb\u200bc\ufeff\ud800") == "a\ufffdb\ufffdc\ufffd\ufffd" and text("é 漢 🙂") == "é 漢 🙂"
    assert text("a\x00\x1b[1m\r\n\t\x7f\x85b") == "a\ufffd\ufffd[1m\ufffd\n\t\ufffd\ufffdb"
    assert text({"a": None}) == "{&#x27;a&#x27;: None}"
