"""Writes the page of a run, or prints a table with the mean and standard deviation over seeds.

python grpo/tools/report.py html out-grpo
python grpo/tools/report.py seeds out-seed-1 out-seed-2 out-seed-3 out-seed-4 out-seed-5 --picture=docs/curves.png
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from core.errors import Mistake, UsageError, run_script
from core.files import METRICS, each_metrics
from core.logger import visible
from grpo.evaluation.samples import evaluations, held_out
from grpo.report.page import draw_curves, write_report


def report_seeds(folders, picture=None):
    """Prints a table of the held-out metrics of runs, and draws their curves if `picture` names a file."""
    runs = []
    for folder in folders:
        records = each_metrics(os.path.join(folder, METRICS))
        runs.append(evaluations(records))
    steps = []
    for run in runs:
        steps.append([record["step"] for record in run])
    is_short = len(steps[0]) < 2
    if is_short or any(x != steps[0] for x in steps):
        raise Mistake(f"{folders} must be finished runs of grpo/train_grpo.py, evaluated at the same steps")
    print("| held-out metric | before | after | change, mean ± sd | least | seeds that rose |")
    print("|---|---|---|---|---|---|")
    for metric in held_out(runs[0][0]):
        before = [run[0].get(metric) for run in runs]
        after = [run[-1].get(metric) for run in runs]
        name = visible(metric.removeprefix("eval/"))
        print(f"| {name} | {seeds_row(before, after)} |")
    if picture:
        draw_curves(runs, picture)


def seeds_row(before, after):
    """The cells of a metric: its means before and after training, and its change; dashes if a run did not measure it.

    before, after: a number for each run
    """
    if None in before + after:
        return "- | - | - | - | -"
    change = np.subtract(after, before)
    first = np.mean(before)
    last = np.mean(after)
    sd = change.std(ddof=len(change) > 1)  # 0 for one run
    rose = (change > 0).sum()
    cells = [
        f"{first:.4f}",
        f"{last:.4f}",
        f"{last - first:+.4f} ± {sd:.4f}",
        f"{change.min():+.4f}",
        f"{rose}/{len(change)}"]
    return " | ".join(cells)


def main(argv):
    folders = [x for x in argv[1:] if not x.startswith("-")]
    pictures = [x.partition("=")[2] for x in argv if x.startswith("--picture=")]
    match argv:
        case ["html", _] if folders:
            print(write_report(*folders))
        case ["seeds", *_] if folders:
            report_seeds(folders, *pictures[-1:])
        case _:
            raise UsageError("python grpo/tools/report.py html FOLDER, or seeds FOLDER... [--picture=FILE]")


if __name__ == "__main__":
    run_script(main)
