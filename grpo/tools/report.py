"""Writes the page of a run, or prints a table of mean and standard deviation over seeds.

python grpo/tools/report.py html out-grpo
python grpo/tools/report.py seeds out-seed-1 out-seed-2 out-seed-3 out-seed-4 out-seed-5 --picture=docs/curves.png
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy as np

from core.errors import Mistake, UsageError, run_script
from core.files import METRICS, each_metrics
from core.logger import visible
from grpo.evaluation.samples import evaluations, held_out
from grpo.report.page import draw_curves, write_report


def report_seeds(folders, picture=None):
    """Prints a table over the runs with a row for each held-out metric, and draws their curves."""
    runs = [evaluations(each_metrics(os.path.join(folder, METRICS))) for folder in folders]
    steps = [[record["step"] for record in run] for run in runs]
    if len(steps[0]) < 2 or any(x != steps[0] for x in steps):
        raise Mistake(f"{folders} must be finished runs of grpo/train_grpo.py, evaluated at the same steps")
    print("| held-out metric | before | after | change, mean ± sd | least | seeds that rose |")
    print("|---|---|---|---|---|---|")
    for metric in held_out(runs[0][0]):
        ends = [(run[0].get(metric), run[-1].get(metric)) for run in runs]               # (before, after) of each run
        print(f"| {visible(metric.removeprefix('eval/'))} | {seeds_row(ends)} |")
    if picture:
        draw_curves(runs, picture)


def seeds_row(ends):
    """A metric before and after training, and its change over runs; dashes if one of them did not measure it."""
    if None in sum(ends, ()):
        return "- | - | - | - | -"
    ends = np.array(ends)                                                                # (runs, 2)
    change = ends[:, 1] - ends[:, 0]
    sd = change.std(ddof=1) if len(change) > 1 else 0.0
    before, after = ends.mean(0)
    return (f"{before:.4f} | {after:.4f} | {after - before:+.4f} ± {sd:.4f} | {change.min():+.4f} | "
            f"{(change > 0).sum()}/{len(change)}")


def main(argv):
    folders = [x for x in argv[1:] if not x.startswith("-")]
    match argv:
        case ["html", folder] if not folder.startswith("-"):
            print(write_report(folder))
        case ["seeds", *_] if folders:
            pictures = [x.partition("=")[2] for x in argv if x.startswith("--picture=")]
            report_seeds(folders, *pictures[-1:])
        case _:
            raise UsageError("python grpo/tools/report.py html FOLDER, or seeds FOLDER... [--picture=FILE]")


if __name__ == "__main__":
    run_script(main)
