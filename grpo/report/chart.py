"""Charts over the steps of a run, as inline SVG; the script of the page shows the values under the pointer."""

import math
from html import escape
from itertools import accumulate

from core.run.terminal import Visible
from grpo.report.run_files import smooth, thin, widened

LEFT, RIGHT, TOP, BOTTOM = 48, 312, 8, 128  # of the plot, in a picture of 320 x 154
DOTS, COLORS = 30, 8                        # a curve of at most DOTS points shows them; COLORS of report.css
LEAST, MOST = 1e-300, 1e300                 # magnitudes that are drawn; beyond them differences are 0 or infinite
VISIBLE = Visible({ord(c): c for c in "\t\n"})


def chart(title, last, lines, stacked=False):
    """A figure with a curve for each of `lines`, over the steps 0 to last.

    lines: [(number of its color, label, [(step, number, or None where it was not finite)])]
    stacked: areas on top of each other, of lines with the same steps
    """
    last = max(last, 1)
    if not stacked:
        shorten = smooth if len(lines) > 1 else thin  # the noise of one line would hide the others
        lines = [(color, label, shorten(points)) for color, label, points in lines]
    heights = [[None if y is None else drawn(y) for y in ys] for ys in heights_of(lines, stacked)]
    finite = [y for ys in heights for y in ys if y is not None]
    if stacked or not finite:
        finite.append(0.0)
    low, high = widened(min(finite), max(finite))

    def across(step):
        return f"{LEFT + (RIGHT - LEFT) * step / last:.1f}"

    def down(y):
        return f"{BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low):.1f}"

    shapes, values = [], []
    for (color, label, points), ys in zip(lines, heights, strict=True):
        color = f"c{color % COLORS}"
        places = [(across(step), None if y is None else down(y)) for (step, _), y in zip(points, ys, strict=True)]
        shapes.append(f'<g class="{color}">{area(places) if stacked else curve(places)}</g>')
        shown = ["not finite" if y is None else short(y) for _, y in points]
        steps = ",".join(str(step) for step, _ in points)
        values.append(f'<span class="{color}">{text(label)} <b data-steps="{steps}" '
                      f'data-values="{",".join(shown)}">{shown[-1]}</b></span>')
    marks = [f'<path class="grid" d="M{LEFT} {down(y)}H{RIGHT}"/><text class="y" x="{LEFT - 5}" y="{down(y)}">{y:.9g}'
             "</text>" for y in ticks(low, high)]
    marks += [f'<text x="{across(step)}" y="{BOTTOM + 9}">{step:g}</text>' for step in ticks(0, last)]
    return (f'<figure><figcaption>{text(title)} {" ".join(values)}</figcaption><svg viewBox="0 0 320 154" role="img" '
            f'aria-label="{text(title)}" data-plot="{LEFT} {RIGHT} {BOTTOM} {last}">'
            + "".join(marks + shapes[::-1]) + "</svg></figure>\n")


def heights_of(lines, stacked):
    """The numbers of each line; stacked, with those of the lines below added."""
    numbers = [[y for _, y in points] for _, _, points in lines]
    if stacked:
        numbers = zip(*map(accumulate, zip(*numbers, strict=True)), strict=True)
    return numbers


def area(places):
    """A filled area down to the axis. places: [(x, y)] as texts"""
    line = "L".join(f"{x} {y}" for x, y in places)
    return f'<path class="area" d="M{line}V{BOTTOM}H{places[0][0]}Z"/>'


def curve(places):
    """A line with a gap and a mark on the axis where y is None, and dots if its points are few."""
    path, dots, pen = "", "", "M"
    for x, y in places:
        if y is None:
            dots += f'<circle class="missing" cx="{x}" cy="{BOTTOM}" r="2.2"/>'
            pen = "M"
            continue
        path += f"{pen}{x} {y}"
        pen = "L"
        if len(places) <= DOTS:
            dots += f'<circle class="dot" cx="{x}" cy="{y}" r="2.2"/>'
    return f'<path class="line" d="{path}"/>{dots}'


def drawn(y):
    """The height at which a number is drawn."""
    return 0.0 if abs(y) < LEAST else max(-MOST, min(y, MOST))


def ticks(low, high):
    """Two to five round numbers between low and high."""
    size = 10 ** math.floor(math.log10((high - low) / 2))
    size *= max(k for k in (1, 2, 5) if 2 * k * size <= (high - low) * 1.000001)
    return [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]


def text(value):
    """A value as HTML: escaped, without characters that nobody sees."""
    return escape(str(value).translate(VISIBLE))


def short(number):
    """A number in five digits."""
    return f"{number:.5g}"
