"""Writes the page of a run, or prints a table of mean and standard deviation over seeds.

python grpo/tools/report.py html out-grpo
python grpo/tools/report.py seeds out-seed-1 out-seed-2 out-seed-3 out-seed-4 out-seed-5 --picture=docs/curves.png
"""

import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from core.config import UsageError
from core.files import METRICS, each_record
from core.settings.script import run_script
from grpo.evaluation.samples import evaluations, held_out
from grpo.report.page import draw_curves, write_report


def report_seeds(folders, picture):
    """Prints a table over the runs with a row for each held-out metric, and draws their curves."""
    runs = []
    for folder in folders:
        found = evaluations(each_record(os.path.join(folder, METRICS)))
        if len(found) < 2:
            raise ValueError(f"{folder}/{METRICS} does not hold a finished run of grpo/train_grpo.py")
        runs.append(found)
    print("| held-out metric | before | after | change, mean ± sd | least | seeds that rose |")
    print("|---|---|---|---|---|---|")
    for metric in held_out(runs[0][0]):
        print(f"| {metric.removeprefix('eval/')} | {seeds_row(metric, runs)} |")
    if picture:
        draw_curves(runs, picture)


def seeds_row(metric, runs):
    """A metric before and after training, and its change over runs; dashes if one of them did not measure it."""
    ends = [(records[0].get(metric), records[-1].get(metric)) for records in runs]   # (before, after) of each run
    if None in sum(ends, ()):
        return "- | - | - | - | -"
    change = [b - a for a, b in ends]
    before, after = map(statistics.mean, zip(*ends, strict=True))
    sd = statistics.stdev(change) if len(change) > 1 else 0.0
    rose = sum(x > 0 for x in change)
    return f"{before:.4f} | {after:.4f} | {after - before:+.4f} ± {sd:.4f} | {min(change):+.4f} | {rose}/{len(change)}"


def main(argv):
    """Reads the command line and writes a report."""
    match argv:
        case ["html", folder] if not folder.startswith("-"):
            return print(write_report(folder))
        case ["seeds", _, *_, last] if last.startswith("--picture="):
            return report_seeds(argv[1:-1], last.partition("=")[2])
        case ["seeds", _, *_] if not argv[-1].startswith("-"):
            return report_seeds(argv[1:], None)
    raise UsageError("python grpo/tools/report.py html FOLDER, or seeds FOLDER... [--picture=FILE]")


if __name__ == "__main__":
    run_script(main)
