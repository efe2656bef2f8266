"""Compares objectives with grpo on two short tasks, on runs with the same seeds.

python bench/objectives.py
python bench/objectives.py --objectives=dapo,gspo,rloo,cispo --seeds=10

The differences of runs with the same seed give a Student's t-interval. All intervals of the table hold together with
95% (Bonferroni). A run that has finished in --folder is not repeated.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np

from core.config import load_config
from core.errors import Mistake, run_script
from core.files import METRICS, each_metrics
from core.settings.setting import Count, Settings
from grpo.evaluation.samples import evaluations
from grpo.losses import OBJECTIVES
from grpo.report.paired import paired

BASE = "grpo"    # the objective that the others are compared with
LEVEL = 0.95     # of all intervals of the table together
# Four minibatches of each rollout: at the first of them the ratios are 1, and many objectives are equal
MINIBATCHES = 4
TASKS = {  # {name: (held-out metric, optimizer steps, settings)}
    "correct sums": ("eval/sampled_accuracy", 160, (
        "config/grpo_arithmetic.py", "--batch_size=24", "--kl_beta=0.001", "--kl_estimator=exact")),
    "valid words": ("eval/word_validity", 256, ("config/grpo_example.py", "--kl_beta=0.1"))}


@dataclass(frozen=True)
class ComparisonConfig(Settings):
    """The objectives to compare, and where their runs are."""

    objectives: tuple[str, ...] = ("dapo", "gspo")  # compared with grpo
    seeds: Count = 5  # runs of each objective and task
    max_iters: Count | None = None  # steps of a run; None: 160 and 256
    folder: str = "out-objectives"  # for the folders of the runs


def trained(c, task, objective, seed):
    """Trains, unless the run has finished before. Returns the first and the last value of the metric."""
    metric, steps, settings = TASKS[task]
    steps = c.max_iters or steps
    folder = os.path.join(c.folder, f"{task.replace(' ', '-')}-{objective}-{seed}")
    records = evaluations_in(folder)
    if not records or records[-1]["step"] != steps:
        command = [
            "grpo/train_grpo.py", *settings, f"--objective={objective}", "--advantage=None", f"--max_iters={steps}",
            f"--minibatches={MINIBATCHES}", f"--eval_interval={steps}", f"--seed={seed}", f"--out_dir={folder}"]
        result = subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL)
        if result.returncode:
            raise Mistake(f"python {' '.join(command)} ended with exit code {result.returncode}: see above")
        records = evaluations_in(folder)
        if not records or records[-1]["step"] != steps:
            raise Mistake(f"{folder} has not reached step {steps}; start again")
    values = [records[0][metric], records[-1][metric]]
    if None in values:
        raise Mistake(f"{folder}: {metric} is not finite; leave its objective out")
    print(f"{folder}: {values[0]:.4f} -> {values[1]:.4f}", flush=True)
    return values


def evaluations_in(folder):
    """The evaluations of a run; none if there is no run."""
    path = os.path.join(folder, METRICS)
    if not os.path.exists(path):
        return []
    return evaluations(each_metrics(path))


def table(found, level):
    """Yields the lines of a table. found: {(task, objective): (seeds, 2) before and after}; level: of each interval"""
    objectives = dict.fromkeys(objective for _, objective in found)
    yield "| objective |" + "".join(f" {task} | difference from {BASE} |" for task in TASKS)
    yield "|---" * (1 + 2 * len(TASKS)) + "|"
    first = [f" {found[task, BASE][:, 0].mean():.3f} | |" for task in TASKS]
    yield f"| before |{''.join(first)}"
    for objective in objectives:
        cells = ""
        for task in TASKS:
            after = found[task, objective][:, 1]
            cells += f" {after.mean():.3f} ± {after.std(ddof=len(after) > 1):.3f} |"
            if objective == BASE:
                cells += " |"
            else:
                difference, low, high = paired(after, found[task, BASE][:, 1], level)
                interval = ""
                if low is not None:
                    interval = f" ({low:+.3f} to {high:+.3f})"
                cells += f" {difference:+.3f}{interval} |"
        yield f"| {objective} |{cells}"


def main(argv):
    """Trains what has not been trained yet, then prints the table."""
    c, _ = load_config(ComparisonConfig, argv)
    unknown = [name for name in c.objectives if name not in OBJECTIVES]
    if unknown:
        raise Mistake(f"objectives: there is no {unknown[0]!r}; choose among {', '.join(OBJECTIVES)}")
    objectives = list(dict.fromkeys((BASE, *c.objectives)))
    comparisons = len(TASKS) * (len(objectives) - 1)
    found = {}
    for objective in objectives:
        for task in TASKS:
            runs = [trained(c, task, objective, seed) for seed in range(1, c.seeds + 1)]
            found[task, objective] = np.array(runs)
    level = 1 - (1 - LEVEL) / max(1, comparisons)
    print(*table(found, level), sep="\n")
    print(f"seeds: {c.seeds}, mean ± sd; paired t-intervals at {level:.2%} each, {LEVEL:.0%} for all {comparisons} "
          "(Bonferroni)")


if __name__ == "__main__":
    run_script(main)
