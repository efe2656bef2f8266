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
    shorter = list if stacked else smooth if len(lines) > 1 else thin  # the noise of one line would hide the others
    lines = [(color % COLORS, label, shorter(points)) for color, label, points in lines]
    heights = [[y for _, y in points] for _, _, points in lines]
    if stacked:
        heights = list(zip(*map(accumulate, zip(*heights, strict=True)), strict=True))
    heights = [[y if y is None else drawn(y) for y in ys] for ys in heights]
    finite = [y for ys in heights for y in ys if y is not None] + [0.0] * stacked or [0.0]
    low, high = widened(min(finite), max(finite))
    across = lambda step: f"{LEFT + (RIGHT - LEFT) * step / max(last, 1):.1f}"
    down = lambda y: f"{BOTTOM - (BOTTOM - TOP) * (y - low) / (high - low):.1f}"
    shapes, values = [], []
    for (color, label, points), ys in zip(lines, heights, strict=True):
        places = [(across(step), down(low if y is None else y), y is None)
                  for (step, _), y in zip(points, ys, strict=True)]
        path = "".join("" if missing else f"{'L' if i and not places[i - 1][2] else 'M'}{x} {y}"
                       for i, (x, y, missing) in enumerate(places)) + f"V{BOTTOM}H{places[0][0]}Z" * stacked
        dots = [f'<circle class="{"missing" if missing else "dot"}" cx="{x}" cy="{y}" r="2.2"/>'
                for x, y, missing in places if missing or len(points) <= DOTS and not stacked]
        shapes.append(f'<g class="c{color}"><path class="{"area" if stacked else "line"}" d="{path}"/>'
                      f'{"".join(dots)}</g>')
        steps, shown = [str(step) for step, _ in points], ["not finite" if y is None else short(y) for _, y in points]
        values.append(f'<span class="c{color}">{text(label)} <b data-steps="{",".join(steps)}" '
                      f'data-values="{",".join(shown)}">{shown[-1]}</b></span>')
    marks = [f'<path class="grid" d="M{LEFT} {down(y)}H{RIGHT}"/><text class="y" x="{LEFT - 5}" y="{down(y)}">{y:.9g}'
             "</text>" for y in ticks(low, high)]
    marks += [f'<text x="{across(step)}" y="{BOTTOM + 9}">{step:g}</text>' for step in ticks(0, max(last, 1))]
    return (f'<figure><figcaption>{text(title)} {" ".join(values)}</figcaption><svg viewBox="0 0 320 154" role="img" '
            f'aria-label="{text(title)}" data-plot="{LEFT} {RIGHT} {BOTTOM} {max(last, 1)}">'
            + "".join(marks + shapes[::-1]) + "</svg></figure>\n")


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
