"""Plots of runs, drawn with matplotlib."""

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from core.whole_files import writing

PANELS = ("judge", "gold_judge", "word_validity", "token_accuracy", "greedy_accuracy", "sampled_accuracy", "pass_at_k",
          "completion_length", "kl", "entropy")  # held-out metrics with a panel, of both kinds of generator


def draw_curves(runs, path, over="step"):
    """Draws a panel for each held-out metric, with a line for each run.

    runs: {label: records of metrics.jsonl}; path: the picture file
    over: "step", or "seconds" of the optimizer steps, without the evaluations between them
    """
    logged = {name for records in runs.values() for record in records for name in record}
    panels = [name for name in PANELS if f"eval/{name}" in logged]
    figure, axes = plt.subplots(2, -(-len(panels) // 2), figsize=(12, 6), sharex=True, squeeze=False)
    for axis, name in zip(axes.flat, panels):
        for i, (label, records) in enumerate(runs.items()):
            place = seconds_of_steps(records) if over == "seconds" else {r["step"]: r["step"] for r in records}
            points = [(place[r["step"]], r[f"eval/{name}"]) for r in records if f"eval/{name}" in r]
            if points:
                axis.plot(*zip(*points, strict=True), marker=".", label=label, color=f"C{i}")
        axis.set_title(name.replace("_", " "))
        axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("optimizer step" if over == "step" else "seconds of training")
    if len(runs) > 1:
        axes[0, 0].legend(fontsize=8)
    save(figure, path)


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
    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    (_, known), *_ = next(iter(curves.values()))
    rewards = [name for name in known if name.startswith("reward/")]
    good = "word_validity" if "word_validity" in known or not rewards else rewards[0]
    pairs = (("token_accuracy", good), ("entropy", good), ("entropy", "token_accuracy"))
    for axis, (x, y) in zip(axes, pairs, strict=True):
        for label, points in curves.items():
            axis.plot([m[x] for _, m in points], [m[y] for _, m in points], marker=".", label=label)
            for temperature, m in points:
                axis.annotate(f"{temperature:g}", (m[x], m[y]), fontsize=7, xytext=(3, 3), textcoords="offset points")
        axis.set_xlabel(x.replace("_", " "))
        axis.set_ylabel(y.replace("_", " "))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    save(figure, path)


def save(figure, path):
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=90)
    plt.close(figure)
