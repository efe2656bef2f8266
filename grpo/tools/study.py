"""Compares settings over seeds on one task, by short runs, and prints the tables of docs/results.md.

python grpo/tools/study.py arithmetic        every objective on sums, several steps per rollout
python grpo/tools/study.py fill_in           every objective on fill-in with the judge
python grpo/tools/study.py estimators        every fill_estimator on fill-in of equations in two passes
python grpo/tools/study.py any_order         every fill_estimator on Countdown in any order
python grpo/tools/study.py samplers          completions by this process, or by a worker of Ray
python grpo/tools/study.py staleness         completions of an iteration ago, with and without corrections, at two high
                                             learning rates
python grpo/tools/study.py staleness_3e-4    the same at the learning rate of the config
python grpo/tools/study.py pass_at_k         Countdown: plain, train_pass_k, and MaxRL
--seeds=5 runs seeds 1 to 5. --out=FOLDER (default out-study) is where the runs are; finished runs are not repeated.
--jobs=2 runs two at a time, with one thread each. Every other setting, such as --max_iters=40, goes to all runs.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy as np

from core.config import UsageError, load_config
from core.files.json_lines import read_records
from core.settings.script import run_script
from core.settings.user_code import ROOT
from grpo.grpo_config import GRPOConfig
from grpo.objectives import OBJECTIVES
from grpo.policies.fill_views import FILL_ESTIMATORS

TRAIN = os.path.join(ROOT, "grpo", "train_grpo.py")
ARGUMENTS = "arguments.json"  # in the folder of a finished run


@dataclass(frozen=True)
class Study:
    """One comparison: its config, the settings that differ, and the held-out metric that is compared."""
    config: str
    heading: str        # of the column that names the choices
    choices: dict       # {name: the arguments that differ between runs}
    metric: str         # the held-out metric, without eval/
    threshold: float    # value of the metric for the column "steps to"
    settings: tuple     # arguments of every run


@dataclass(frozen=True)
class StudyConfig:
    """The settings of a study. All other arguments go to every run."""
    seeds: int = 5          # the seeds are 1 to this number
    jobs: int = 1           # number of runs at a time
    out: str = "out-study"  # the folder of the runs

    def __post_init__(self):
        if self.seeds < 1 or self.jobs < 1:
            raise ValueError(f"seeds={self.seeds} and jobs={self.jobs} must be at least 1")


def values(keys, names):
    """The choices of a study. keys: the settings that differ; names: the values of each choice; both with commas."""
    keys = keys.split(", ")
    return {name: tuple(f"--{key}={x}" for key, x in zip(keys, name.split(", "), strict=True)) for name in names}


ZOO = values("objective", (name for name in OBJECTIVES if name != "drgrpo"))  # the same row as dr_grpo
ESTIMATORS = values("fill_estimator", (name for name in FILL_ESTIMATORS if name != "step_merge"))
ESTIMATORS["agrpo"] += ("--passes_read=1",)  # of two; with two segments step_merge is trajectory
PASS = "advantage, train_pass_k"
PASSES = ("leave_one_out, 1", "leave_one_out, 2", "max_rl, 1")
STALE = "learning_rate, max_staleness, ratio_to, objective"
CORRECTIONS = ("0, policy, grpo", "1, policy, grpo", "1, sampler, grpo", "1, sampler, dppo")
SLOW = [f"0.0003, {name}" for name in CORRECTIONS]
FAST = [f"{rate}, {name}" for rate in ("0.0006", "0.001") for name in CORRECTIONS]
STUDIES = {
    "arithmetic": Study("config/grpo_arithmetic.py", "objective", ZOO, "sampled_accuracy", 0.55, (
        "--advantage=None", "--kl_beta=0.001", "--kl_estimator=exact", "--batch_size=24", "--minibatches=4",
        "--max_iters=48", "--warmup_iters=4", "--eval_interval=12", "--eval_problems=64", "--eval_completions=8")),
    "fill_in": Study("config/grpo_example.py", "objective", ZOO, "word_validity", 0.46, (
        "--advantage=None", "--minibatches=4", "--max_iters=64", "--warmup_iters=4", "--eval_interval=8",
        "--eval_problems=32", "--gold_judge_checkpoint=None")),
    "estimators": Study("config/grpo_equations.py", "fill_estimator", ESTIMATORS, "reward/equations", 0.6, ()),
    "any_order": Study("config/grpo_any_order.py", "fill_estimator", values("fill_estimator", FILL_ESTIMATORS),
                       "sampled_accuracy", 0.35, ("--max_iters=100", "--eval_interval=50", "--eval_problems=128")),
    "samplers": Study("config/grpo_arithmetic.py", "sampler", values("sampler", ("local", "ray")), "sampled_accuracy",
                      0.9, ()),
    "staleness": Study("config/grpo_arithmetic.py", STALE, values(STALE, FAST), "sampled_accuracy", 0.7, (
        "--min_lr=None", "--max_iters=100", "--eval_interval=25", "--eval_problems=128")),
    "staleness_3e-4": Study("config/grpo_arithmetic.py", STALE, values(STALE, SLOW), "sampled_accuracy", 0.9, ()),
    "pass_at_k": Study("config/grpo_countdown.py", PASS, values(PASS, PASSES), "pass_at_k", 0.82, ()),
}


def finished(folder, arguments):
    """The records of the run in a folder if it is finished and had these arguments, else None."""
    path = os.path.join(folder, ARGUMENTS)
    if not os.path.exists(path):
        return None
    with open(path) as f:
        same = json.load(f) == arguments
    return read_records(os.path.join(folder, "metrics.jsonl")) if same else None


def run(study, choice, seed, out, env, settings):
    """Trains one run, unless it is already finished, and returns its records."""
    folder = os.path.join(out, f"{choice.replace(', ', '-')}-{seed}")
    arguments = [study.config, *study.settings, *study.choices[choice], f"--seed={seed}",
                 "--sample_interval=1000000", "--save_interval=1000000", "--dtype=float32",
                 f"--out_dir={folder}", *settings]
    if finished(folder, arguments) is None:
        command = [sys.executable, TRAIN, *arguments]
        with contextlib.suppress(FileNotFoundError):  # of another run, whose records this one sets aside
            os.remove(os.path.join(folder, ARGUMENTS))
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{' '.join(command)} failed:\n{done.stderr}")
        with open(os.path.join(folder, ARGUMENTS), "w") as f:
            json.dump(arguments, f)
        sys.stderr.write(f"{folder}: done\n")  # one write: the lines of two jobs do not mix
    return finished(folder, arguments)


def seconds(records, until):
    """Seconds of sampling, scoring and training up to step `until`, without evaluation."""
    return sum(value for r in records if r["step"] <= until for name, value in r.items() if name.startswith("time/"))


def summary(study, runs, equal_time):
    """One row of the table. runs: the records of each seed; equal_time: seconds for the column "... after"."""
    metric = f"eval/{study.metric}"
    figures, steps = [], []
    for records in runs:
        evaluations = [r for r in records if metric in r]
        times = [seconds(records, r["step"]) for r in evaluations]
        values = [r[metric] for r in evaluations]
        then = np.interp(equal_time, times, values)
        figures.append((values[0], values[-1], then, evaluations[-1].get("eval/kl", 0.0), times[-1]))
        steps += [r["step"] for r in evaluations if r[metric] >= study.threshold][:1]
    first, last, then, kl, spent = zip(*figures, strict=True)
    reached = f"{statistics.mean(steps):.0f}" if steps else "-"
    return (f"{statistics.mean(first):.3f} | {mean_and_deviation(last)} | {mean_and_deviation(then)} | "
            f"{reached} ({len(steps)}/{len(runs)}) | {statistics.mean(kl):.3f} | {statistics.mean(spent):.0f}")


def mean_and_deviation(x):
    deviation = statistics.stdev(x) if len(x) > 1 else 0.0
    return f"{statistics.mean(x):.3f} ± {deviation:.3f}"


def main(argv):
    """Trains the runs that are missing and prints the table."""
    if not argv or argv[0] not in STUDIES or {"--help", "-h"} & set(argv):
        raise UsageError(f"python grpo/tools/study.py {'|'.join(STUDIES)} [--seeds=5] [--jobs=1] [--out=out-study]")
    study = STUDIES[argv[0]]
    ours = tuple(f"--{f.name}=" for f in fields(StudyConfig))
    c, _ = load_config(StudyConfig, [a for a in argv[1:] if a.startswith(ours)])
    settings = [a for a in argv[1:] if not a.startswith(ours)]
    load_config(GRPOConfig, [study.config, *study.settings, *settings])  # a mistake shows now, not after the first run
    out = os.path.join(c.out, argv[0])
    env = dict(os.environ)
    if c.jobs > 1:
        env["OMP_NUM_THREADS"] = "1"
    seeds = range(1, c.seeds + 1)
    with ThreadPoolExecutor(c.jobs) as pool:
        jobs = {choice: [pool.submit(run, study, choice, seed, out, env, settings) for seed in seeds]
                for choice in study.choices}
    runs = {choice: [job.result() for job in of_choice] for choice, of_choice in jobs.items()}
    equal_time = min(seconds(records, records[-1]["step"]) for of_choice in runs.values() for records in of_choice)
    print(f"| {study.heading} | before | {study.metric} after | ... after {equal_time:.0f} s | "
          f"steps to {study.threshold:g} | KL | seconds |\n|---|---|---|---|---|---|---|")
    for choice, of_choice in runs.items():
        print(f"| {choice} | {summary(study, of_choice, equal_time)} |")


if __name__ == "__main__":
    run_script(main)
