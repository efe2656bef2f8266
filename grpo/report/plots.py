"""Plots of runs, drawn with matplotlib."""

import math

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from core.files.whole_files import writing

SHARES = {"judge", "gold_judge", "word_validity", "words_recovered", "token_accuracy", "greedy_accuracy",
          "sampled_accuracy", "pass_at_k", "truncated"}  # held-out metrics whose axis ends at 1 in every picture
MOST_COLUMNS = 4
LEAST_HEIGHT = 1e-6   # of an axis; what is smaller is rounding
DOTS_PER_INCH = 150


def draw_curves(runs, path):
    """Draws a panel for each held-out metric, with a line for each run. No axis is cut: all begin at 0 or below.

    runs: {label: records of metrics.jsonl}; path: the picture file
    """
    records = [record for found in runs.values() for record in found]
    names = dict.fromkeys(name for record in records for name in record if name.startswith("eval/"))
    rows = math.ceil(len(names) / MOST_COLUMNS)
    columns = math.ceil(len(names) / rows)  # the rows are about equally full
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for axis, name in zip(axes.flat, names, strict=False):
        draw_panel(axis, name, runs)
    if len(runs) > 1:
        axes[0, 0].legend(fontsize=8)
    save(figure, path)


def draw_panel(axis, name, runs):
    """Draws one held-out metric of each run."""
    for label, records in runs.items():
        measured = [record for record in records if name in record]
        steps = [record["step"] for record in measured]
        axis.plot(steps, [record[name] for record in measured], marker=".", label=label)
    short = name.removeprefix("eval/")
    low, high = axis.get_ylim()
    if short in SHARES:
        high = 1.05  # a curve at 1 is seen whole
    axis.set_ylim(min(low, 0), max(high, LEAST_HEIGHT))
    axis.set_title(short.replace("_", " "))
    axis.set_xlabel("optimizer step")
    axis.grid(alpha=0.3)


def save(figure, path):
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
