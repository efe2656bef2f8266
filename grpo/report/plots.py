"""Plots of runs, drawn with matplotlib."""

import math

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from core.files.whole_files import writing
from grpo.report.run_files import widened

SHARES = {"judge", "gold_judge", "word_validity", "words_recovered", "token_accuracy", "greedy_accuracy",
          "sampled_accuracy", "pass_at_k", "truncated"}  # held-out metrics with an axis from 0 to 1 in every picture
MOST_COLUMNS = 4
MARGIN = 0.05         # above and below the curves, as a share of the height
DOTS_PER_INCH = 150


def draw_curves(runs, path, over="step"):
    """Draws a panel for each held-out metric, with a line for each run. No axis is cut: all begin at 0 or below.

    runs: {label: records of metrics.jsonl}; path: the picture file
    over: "step", or "seconds" of the optimizer steps, without the evaluations between them
    """
    logged = dict.fromkeys(name for records in runs.values() for record in records for name in record)
    names = [name for name in logged if name.startswith("eval/")]
    rows = math.ceil(len(names) / MOST_COLUMNS)
    columns = math.ceil(len(names) / rows)  # the rows are about equally full
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 3 * rows), sharex=True, squeeze=False)
    for axis in axes.flat[len(names) :]:
        axis.remove()
    for i, (axis, name) in enumerate(zip(axes.flat, names, strict=False)):
        draw_metric(axis, name, runs, over)
        lowest_of_its_column = i + columns >= len(names)
        if lowest_of_its_column:
            axis.set_xlabel("optimizer step" if over == "step" else "seconds of training")
            axis.tick_params(labelbottom=True)
    if len(runs) > 1:
        axes[0, 0].legend(fontsize=8)
    save(figure, path)


def draw_metric(axis, name, runs, over):
    """Draws a held-out metric of all runs. A number that is not finite is a gap."""
    drawn = [0.0]
    for i, (label, records) in enumerate(runs.items()):
        seconds = seconds_of_steps(records)
        steps = [r["step"] for r in records if name in r]
        numbers = [math.nan if r[name] is None else r[name] for r in records if name in r]
        places = [seconds[step] for step in steps] if over == "seconds" else steps
        axis.plot(places, numbers, marker=".", label=label, color=f"C{i}")
        drawn += [y for y in numbers if not math.isnan(y)]
    short = name.removeprefix("eval/")
    low, high = (0.0, 1.0) if short in SHARES else widened(min(drawn), max(drawn))
    margin = MARGIN * (high - low)
    axis.set_ylim(low - margin, high + margin)
    axis.set_title(short.replace("_", " "))
    axis.grid(alpha=0.3)


def seconds_of_steps(records):
    """{step: seconds that it and the steps before it took}."""
    found, total = {}, 0.0
    for record in records:
        total += sum(seconds for name, seconds in record.items() if name.startswith("time/"))
        found[record["step"]] = total
    return found


def draw_temperatures(curves, path):
    """Draws word validity, or the first reward of a task without words, and token accuracy against each other and
    against entropy, with a point for each temperature.

    curves: {label: [(temperature, metrics)]}; path: the picture file
    """
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2))
    first_curve = next(iter(curves.values()))
    _, metrics = first_curve[0]
    rewards = [name for name in metrics if name.startswith("reward/")]
    good = rewards[0] if rewards and "word_validity" not in metrics else "word_validity"
    pairs = (("token_accuracy", good), ("entropy", good), ("entropy", "token_accuracy"))
    for axis, (x, y) in zip(axes, pairs, strict=True):
        for label, points in curves.items():
            axis.plot([m[x] for _, m in points], [m[y] for _, m in points], marker=".", label=label)
            for temperature, m in (points[0], points[-1]):  # labels between them would cover each other
                axis.annotate(f"{temperature:g}", (m[x], m[y]), fontsize=8, xytext=(4, 4), textcoords="offset points")
        axis.margins(0.1)
        axis.set_xlabel(x.replace("_", " "))
        axis.set_ylabel(y.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    temperatures = ", ".join(f"{temperature:g}" for temperature, _ in first_curve)
    figure.suptitle(f"A point for each sampling temperature ({temperatures}). The axes do not begin at 0.", fontsize=10)
    save(figure, path)


def save(figure, path):
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=DOTS_PER_INCH)
    plt.close(figure)
