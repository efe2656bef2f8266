"""Charts over the steps of a run, as inline SVG; the script of the page shows the values under the pointer."""

import math
from html import escape

from core.run.terminal import visible

LEFT, RIGHT, TOP, BOTTOM = 48, 312, 8, 128  # of the plot, in a picture of 320 x 154
COLORS = 8                                  # of report.css
MEANS = 60                                  # points of a line beside others
LEAST_HEIGHT, LEAST_SHARE = 1e-6, 1e-3      # of an axis, and as a share of its numbers; what is smaller is rounding


def chart(title, last, lines):
    """A figure with a curve for each of `lines`, over the steps 0 to last.

    lines: [(number of its color, [(step, number, or None where it was not finite)])]
    """
    last = max(last, 1)
    if len(lines) > 1:  # the noise of one line would hide the others
        lines = [(color, smooth(points)) for color, points in lines]
    finite = [y for _, points in lines for _, y in points if y is not None] or [0.0]
    low, high = min(finite), max(finite)
    least = max(LEAST_HEIGHT, LEAST_SHARE * max(-low, high))
    missing = max(0.0, least - (high - low))
    low, high = low - missing / 2, high + missing / 2

    def across(step):
        return f"{LEFT + (RIGHT - LEFT) * step / last:.1f}"

    def down(y):
        return f"{BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low):.1f}"

    marks, curves, values = "", "", ""
    for y in ticks(low, high):
        marks += f'<path class="grid" d="M{LEFT} {down(y)}H{RIGHT}"/>'
        marks += f'<text class="y" x="{LEFT - 5}" y="{down(y)}">{y:.9g}</text>'
    for step in ticks(0, last):
        marks += f'<text x="{across(step)}" y="{BOTTOM + 9}">{step:g}</text>'
    for color, points in lines:
        places = [(across(step), None if y is None else down(y)) for step, y in points]
        curves += f'<g class="c{color % COLORS}">{curve(places)}</g>'
        shown = ["not finite" if y is None else short(y) for _, y in points]
        steps = ",".join(str(step) for step, _ in points)
        values += (f' <b class="c{color % COLORS}" data-steps="{steps}" data-values="{",".join(shown)}">{shown[-1]}'
                   "</b>")
    return (f'<figure><figcaption>{text(title)}{values}</figcaption><svg viewBox="0 0 320 154" role="img" '
            f'aria-label="{text(title)}" data-plot="{LEFT} {RIGHT} {BOTTOM} {last}">{marks}{curves}</svg></figure>\n')


def smooth(points):
    """Reduces a curve to MEANS points: the last step of each stretch, the mean of its finite numbers or None."""
    size = math.ceil(len(points) / MEANS)
    means = []
    for first in range(0, len(points), size):
        part = points[first : first + size]
        finite = [y for _, y in part if y is not None]
        means.append((part[-1][0], sum(finite) / len(finite) if finite else None))
    return means


def curve(places):
    """A line with a gap and a mark on the axis where y is None. places: [(x, y)] as texts"""
    path, dots, pen = "", "", "M{} {}h0"  # h0: a point alone is shown too
    for x, y in places:
        if y is None:
            dots += f'<circle class="missing" cx="{x}" cy="{BOTTOM}" r="2.2"/>'
            pen = "M{} {}h0"
        else:
            path += pen.format(x, y)
            pen = "L{} {}"
    return f'<path class="line" d="{path}"/>{dots}'


def ticks(low, high):
    """Two to five round numbers between low and high."""
    size = 10 ** math.floor(math.log10((high - low) / 2))
    size *= max(k for k in (1, 2, 5) if 2 * k * size <= (high - low) * 1.000001)
    return [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]


def text(value):
    """A value as HTML: escaped, without characters that nobody sees."""
    return escape(visible(str(value), kept="\t\n"))


def short(number):
    """A number in five digits."""
    return f"{number:.5g}"
