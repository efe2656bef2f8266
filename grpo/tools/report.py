"""Writes the page of a run, prints a table with the mean and standard deviation over seeds, or compares two sets of
runs.

python grpo/tools/report.py html out-grpo
python grpo/tools/report.py seeds out-seed-1 out-seed-2 out-seed-3 out-seed-4 out-seed-5 --picture=docs/curves.png
python grpo/tools/report.py seeds out-a-1 out-a-2 out-a-3 --against out-b-1 out-b-2 out-b-3
The last command pairs runs of the same seed and prints the mean differences with 95 % intervals (Student's t).
"""

import os
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from core.errors import Mistake, UsageError, run_script
from core.files import CONFIG, METRICS, each_metrics, read_object, starts_of
from core.logger import visible
from core.resume import changes, completed
from core.settings.setting import shown
from grpo.evaluation.samples import evaluations, held_out
from grpo.grpo_config import GRPOConfig
from grpo.report.page import draw_curves, write_report
from grpo.report.paired import paired


def report_seeds(folders, picture=None):
    """Prints a table of the held-out metrics of runs, and draws their curves if `picture` names a file."""
    runs, settings = read_runs(folders)
    runs = list(runs.values())
    steps = set()
    for run in runs:
        steps.add(tuple(record["step"] for record in run))
    if len(steps) > 1 or len(min(steps)) < 2:
        raise Mistake(f"{folders} must be finished runs of grpo/train_grpo.py, evaluated at the same steps")
    print_changes("settings that differ between the runs", pairwise(settings.values()))
    before = [run[0] for run in runs]
    after = [run[-1] for run in runs]
    print_table("before | after | change", before, after)
    if picture:
        draw_curves(runs, picture)


def report_pairs(folders_a, folders_b):
    """Prints a table of the differences of two sets of runs, paired by seed, in the held-out metrics of their end."""
    a, settings_a = read_runs(folders_a)
    b, settings_b = read_runs(folders_b)
    if not a or a.keys() != b.keys():
        raise Mistake(f"A has the seeds {', '.join(a)} and B {', '.join(b)}; name runs of the same seeds")
    ends_a = [a[seed][-1] for seed in a]
    ends_b = [b[seed][-1] for seed in a]
    steps = {end["step"] for end in ends_a + ends_b}
    if len(steps) > 1:
        raise Mistake(f"the last evaluations are of the steps {sorted(steps)}; name runs that ended at the same step")
    print(f"pairs of runs with the same seed: {len(a)} (seeds {', '.join(a)}), evaluated at step {min(steps)}")
    print_changes("settings that differ within A", pairwise(settings_a.values()))
    print_changes("settings that differ within B", pairwise(settings_b.values()))
    pairs = [(settings_a[seed], settings_b[seed]) for seed in a]
    print_changes("settings of A -> B", pairs)
    print_table("B | A | A - B", ends_b, ends_a)


def read_runs(folders):
    """Returns {seed: evaluations} and {seed: settings} of runs. Raises Mistake if two of them have the same seed."""
    runs = {}
    settings = {}
    for folder in folders:
        evaluated = evaluations(each_metrics(os.path.join(folder, METRICS)))
        if not evaluated:
            raise Mistake(f"{folder} has no evaluation; name folders of finished runs of grpo/train_grpo.py")
        path = os.path.join(folder, CONFIG)
        saved = read_object(path, path, "leave the run out")
        starts_of(saved, path)  # checks their form
        saved = completed(saved, GRPOConfig)
        seed = shown(saved.pop("seed"))
        if seed in runs:
            raise Mistake(f"{folder} has the seed {seed} of a run before it; leave one of them out")
        runs[seed] = evaluated
        settings[seed] = saved
    return runs, settings


def print_changes(title, pairs):
    """Prints in one line the settings that differ within the pairs, each {setting: value} of two runs."""
    found = {}
    for before, now in pairs:
        found |= dict.fromkeys(changes(before, now))
    if found:
        print(f"{title}: {', '.join(found)}")


def print_table(names, before, after):
    """Prints a row for each held-out metric: two means and their difference; dashes if a run did not measure it.

    names: of these three columns; before, after: {metric: number} of each run
    """
    print(f"| held-out metric | {names}, mean ± sd | 95 % interval | least | seeds above 0 |")
    print("|---|---|---|---|---|---|---|")
    for metric in held_out(before[0] | after[0]):
        first = [run.get(metric) for run in before]
        last = [run.get(metric) for run in after]
        cells = "- | - | - | - | - | -"
        if None not in first + last:
            cells = cells_of(first, last)
        name = visible(metric.removeprefix("eval/"))
        print(f"| {name} | {cells} |")


def cells_of(before, after):
    """The cells of a metric. before, after: a number for each run"""
    change = np.subtract(after, before)
    sd = change.std(ddof=len(change) > 1)  # 0 for one run
    mean, low, high = paired(after, before)
    interval = "-"
    if low is not None:
        interval = f"{low:+.4f} to {high:+.4f}"
    rose = (change > 0).sum()
    cells = [
        f"{np.mean(before):.4f}",
        f"{np.mean(after):.4f}",
        f"{mean:+.4f} ± {sd:.4f}",
        interval,
        f"{change.min():+.4f}",
        f"{rose}/{len(change)}"]
    return " | ".join(cells)


def main(argv):
    """Prints what the arguments ask for, or writes the page."""
    pictures = [x for x in argv if x.startswith("--picture=")]
    given = [x for x in argv if x not in pictures]
    match given:
        case ["html", folder] if not pictures:
            print(write_report(folder))
        case ["seeds", _, *_] if given.count("--against") == 1 and given[-1] != "--against" and not pictures:
            middle = given.index("--against")
            report_pairs(given[1:middle], given[middle + 1 :])
        case ["seeds", _, *_] if not any(x.startswith("--") for x in given):
            names = [x.removeprefix("--picture=") for x in pictures]
            report_seeds(given[1:], *names[-1:])
        case _:
            raise UsageError("python grpo/tools/report.py html FOLDER, or seeds FOLDER... [--against FOLDER... or "
                             "--picture=FILE]")


if __name__ == "__main__":
    run_script(main)
