"""Pages and tables of results: a run, several runs side by side, mean and standard deviation over seeds.

python grpo/tools/report.py html out-grpo
python grpo/tools/report.py compare out-a out-b out-c --page=compare.html
python grpo/tools/report.py seeds out-seed-1 out-seed-2 out-seed-3 out-seed-4 out-seed-5 --picture=docs/curves.png
"""

import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from core.config import UsageError
from core.files.json_lines import each_record
from core.settings.script import run_script
from grpo.report.page import write_report
from grpo.report.plots import draw_curves
from grpo.report.run_files import is_evaluation, names_of


def report_seeds(folders, picture):
    """Prints a table over the runs with a row for each held-out metric, and draws their curves."""
    runs = {}
    for name, folder in zip(names_of(folders), folders, strict=True):
        runs[name] = [r for r in each_record(os.path.join(folder, "metrics.jsonl")) if is_evaluation(r)]
        if len(runs[name]) < 2:
            raise ValueError(f"{folder}/metrics.jsonl does not hold a finished run of grpo/train_grpo.py")
    print("| held-out metric | before | after | change, mean ± sd | least | seeds that rose |")
    print("|---|---|---|---|---|---|")
    first_run = next(iter(runs.values()))
    for metric in first_run[0]:
        if metric.startswith("eval/"):
            print(f"| {metric.removeprefix('eval/')} | {seeds_row(metric, runs.values())} |")
    if picture:
        draw_curves(runs, picture)


def seeds_row(metric, runs):
    """A metric before and after training, and its change over runs; dashes if one of them did not measure it."""
    before = [evaluations[0].get(metric) for evaluations in runs]
    after = [evaluations[-1].get(metric) for evaluations in runs]
    if None in before + after:
        return "- | - | - | - | -"
    change = [b - a for a, b in zip(before, after, strict=True)]
    sd = statistics.stdev(change) if len(change) > 1 else 0.0
    rose = sum(x > 0 for x in change)
    return (f"{statistics.mean(before):.4f} | {statistics.mean(after):.4f} | "
            f"{statistics.mean(change):+.4f} ± {sd:.4f} | {min(change):+.4f} | {rose}/{len(change)}")


def main(argv):
    """Reads the command line and writes one of the three reports."""
    options = {"--picture": None, "--page": "compare.html"}
    rest = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if key in options and equals:
            options[key] = value
        else:
            rest.append(argument)
    kind, *rest = rest or [None]
    folders = rest and not any(argument.startswith("-") for argument in rest)
    if kind == "seeds" and folders:
        return report_seeds(rest, options["--picture"])
    if kind == "compare" and folders:
        return print(write_report(*rest, path=options["--page"]))
    if kind == "html" and folders and len(rest) == 1:
        return print(write_report(*rest))
    raise UsageError("python grpo/tools/report.py html FOLDER, compare FOLDER... [--page=FILE], "
                     "or seeds FOLDER... [--picture=FILE]")


if __name__ == "__main__":
    run_script(main)
