"""Charts over the steps of a run, as inline SVG."""

import math
from html import escape

from core.logger import visible

LEFT, RIGHT, TOP, BOTTOM = 48, 312, 8, 128  # of the plot, in a picture of 320 x 144
LEAST_HEIGHT, LEAST_SHARE = 1e-6, 1e-3      # of an axis, and as a share of its numbers; what is smaller is rounding


def chart(title, last, points):
    """A figure with a curve over the steps 0 to last, in which what was not finite is a gap and a mark on the axis.

    points: [(step, number, or None where it was not finite)]
    """
    last = max(last, 1)
    finite = [y for _, y in points if y is not None] or [0.0]
    low, high = min(finite), max(finite)
    least = max(LEAST_HEIGHT, LEAST_SHARE * max(-low, high))
    missing = max(0.0, least - (high - low))
    low, high = low - missing / 2, high + missing / 2

    def across(step):
        return f"{LEFT + (RIGHT - LEFT) * step / last:.1f}"

    def down(y):
        return f"{BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low):.1f}"

    marks, line, inside = "", "", False
    for y in ticks(low, high):
        marks += f'<path class="grid" d="M{LEFT} {down(y)}H{RIGHT}"/>'
        marks += f'<text class="y" x="{LEFT - 5}" y="{down(y)}">{y:.9g}</text>'
    for step in ticks(0, last):
        marks += f'<text x="{across(step)}" y="{BOTTOM + 9}">{step:g}</text>'
    for step, y in points:
        if y is None:
            marks += f'<circle cx="{across(step)}" cy="{BOTTOM}" r="2.2"/>'
        elif inside:
            line += f"L{across(step)} {down(y)}"
        else:
            line += f"M{across(step)} {down(y)}h0"  # h0: a point alone is shown too
        inside = y is not None
    latest = "not finite" if points[-1][1] is None else f"{points[-1][1]:.5g}"
    return (f'<figure><figcaption>{text(title)} <b>{latest}</b></figcaption><svg viewBox="0 0 320 144" role="img" '
            f'aria-label="{text(title)}">{marks}<path class="line" d="{line}"/></svg></figure>\n')


def ticks(low, high):
    """Two to five round numbers between low and high."""
    size = 10 ** math.floor(math.log10((high - low) / 2))
    size *= max(k for k in (1, 2, 5) if 2 * k * size <= (high - low) * 1.000001)
    return [i * size for i in range(math.ceil(low / size), math.floor(high / size) + 1)]


def text(value):
    """A value as HTML: escaped, without characters that nobody sees."""
    return escape(visible(str(value), kept="\t\n"))
