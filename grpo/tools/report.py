"""Writes the page of a run, prints a table with the mean and standard deviation over seeds, or compares two sets of
runs.

python grpo/tools/report.py html out-grpo
python grpo/tools/report.py seeds out-seed-1 out-seed-2 out-seed-3 out-seed-4 out-seed-5 --picture=docs/curves.png
python grpo/tools/report.py seeds out-a-1 out-a-2 out-a-3 --against out-b-1 out-b-2 out-b-3
The last command pairs runs of the same seed and prints the mean differences with 95 % intervals (Student's t).
"""

import os
import sys
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
    steps = []
    for run in runs:
        steps.append([record["step"] for record in run])
    is_short = len(steps[0]) < 2
    if is_short or any(x != steps[0] for x in steps):
        raise Mistake(f"{folders} must be finished runs of grpo/train_grpo.py, evaluated at the same steps")
    print_changes("settings that differ between the runs", settings)
    print("| held-out metric | before | after | change, mean ± sd | least | seeds that rose |")
    print("|---|---|---|---|---|---|")
    for metric in held_out(runs[0][0]):
        before = [run[0].get(metric) for run in runs]
        after = [run[-1].get(metric) for run in runs]
        name = visible(metric.removeprefix("eval/"))
        print(f"| {name} | {seeds_row(before, after)} |")
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
    print_changes("settings that differ within A", settings_a)
    print_changes("settings that differ within B", settings_b)
    print_changes("settings of A -> B", settings_b, settings_a)
    print("| held-out metric | A | B | A - B | 95 % interval |")
    print("|---|---|---|---|---|")
    for metric in held_out(ends_a[0] | ends_b[0]):
        after_a = [end.get(metric) for end in ends_a]
        after_b = [end.get(metric) for end in ends_b]
        name = visible(metric.removeprefix("eval/"))
        print(f"| {name} | {pairs_row(after_a, after_b)} |")


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


def print_changes(title, now, before=None):
    """Prints in one line the settings that differ between runs of a seed, or from the first run if `before` is None.
    now, before: {seed: settings}"""
    if before is None:
        first = next(iter(now.values()))
        before = dict.fromkeys(now, first)
    found = {}
    for seed in now:
        found |= dict.fromkeys(changes(before[seed], now[seed]))
    if found:
        print(f"{title}: {', '.join(found)}")


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


def pairs_row(after_a, after_b):
    """The cells of a metric: both means, and the difference with its interval; dashes if a run did not measure it.

    after_a, after_b: a number for each run
    """
    if None in after_a + after_b:
        return "- | - | - | -"
    difference, low, high = paired(after_a, after_b)
    interval = "-"
    if low is not None:
        interval = f"{low:+.4f} to {high:+.4f}"
    return f"{np.mean(after_a):.4f} | {np.mean(after_b):.4f} | {difference:+.4f} | {interval}"


def main(argv):
    """Prints what the arguments ask for, or writes the page."""
    folders = [x for x in argv[1:] if not x.startswith("--picture=")]
    pictures = [x.partition("=")[2] for x in argv if x.startswith("--picture=")]
    match argv:
        case ["html", _] if folders:
            print(write_report(*folders))
        case ["seeds", *given] if "--against" in given:
            middle = given.index("--against")
            report_pairs(given[:middle], given[middle + 1 :])
        case ["seeds", *_] if folders:
            report_seeds(folders, *pictures[-1:])
        case _:
            raise UsageError("python grpo/tools/report.py html FOLDER, or seeds FOLDER... [--against FOLDER... or "
                             "--picture=FILE]")


if __name__ == "__main__":
    run_script(main)
