"""Pictures of runs, drawn with matplotlib."""

import math

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from core.files import writing
from grpo.report.chart import LEAST_HEIGHT

COLUMNS = 4


def draw_curves(runs, path):
    """Draws a panel for each held-out metric, with a line for each run. No axis is cut: all begin at 0 or below.

    runs: {label: records of metrics.jsonl with held-out metrics}; path: the picture file
    """
    records = [record for found in runs.values() for record in found]
    names = dict.fromkeys(name for record in records for name in record if name.startswith("eval/"))
    rows = math.ceil(len(names) / COLUMNS)
    figure = plt.figure(figsize=(4 * min(COLUMNS, len(names)), 3 * rows))
    for place, name in enumerate(names, 1):
        axis = figure.add_subplot(rows, min(COLUMNS, len(names)), place)
        for label, found in runs.items():
            measured = [(record["step"], record[name]) for record in found if name in record]
            axis.plot([step for step, _ in measured], [y for _, y in measured], marker=".", label=label)
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0), max(high, LEAST_HEIGHT))
        axis.set_title(name.removeprefix("eval/").replace("_", " "))
        axis.set_xlabel("optimizer step")
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        figure.axes[0].legend(fontsize=8)
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=150)
    plt.close(figure)
