"""Whether a long run stays flat: memory, file handles, threads, time of a step, size of its metrics.

python tests/soak.py --kind=fill --steps=10000
python tests/soak.py --kind=causal --steps=10000
A run of tiny models by the real trainer in this process (Linux alone), with evaluations, samples and states. Prints a
table, slopes by least squares over the second half, and one JSON object; exits 1 if memory, handles or threads grow,
or steps get slower, or records of metrics larger.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np

from core.config import load_config
from core.logger import Logger
from core.settings.script import run_script
from tests.grpo.trainers import evaluated_trainer, prompt_trainer
from tests.tiny import TEXT, write_prompt_dataset, write_text_dataset

LIMITS = {"megabytes_per_1000_steps": 0.5,  # in the second half; less is the allocator's noise
          "handles_per_1000_steps": 0.05, "threads_per_1000_steps": 0.05,
          "last_tenth_to_second_in_cpu_time": 1.5,  # a shared machine changes it by a fifth
          "last_tenth_to_second_in_bytes": 1.2}
SETTINGS = {"ppo_epochs": 2, "minibatches": 2, "reference_mode": "ema", "kl_target": 0.1, "top_p": 0.95,
            "learning_rate": 1e-6, "min_lr": 1e-7}  # so small that completions keep their lengths: every step is alike


@dataclass(frozen=True)
class Soak:
    """The settings of this script."""
    kind: str = "fill"    # fill or causal
    steps: int = 10_000   # optimizer steps
    every: int = 0        # steps between two measurements; 0: a hundredth of the steps
    interval: int = 100   # steps between two evaluations, sets of samples and states

    def __post_init__(self):
        if self.kind not in ("fill", "causal") or self.steps < 100:
            raise ValueError(f"kind={self.kind!r} must be fill or causal, steps={self.steps} at least 100")


class Watched(Logger):
    """A logger that measures the process every `every` steps."""

    def __init__(self, *arguments, every):
        super().__init__(*arguments)
        self.done, self.measure_every, self.measured = 0, every, []

    def tick(self):
        super().tick()
        self.done += 1
        if self.done % self.measure_every == 0:
            with open("/proc/self/statm") as f:
                pages = int(f.read().split()[1])
            self.measured.append({
                "step": self.done, "seconds": time.perf_counter(), "cpu_seconds": time.process_time(),
                "bytes": os.path.getsize(self.path),
                "megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                "handles": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))})


def run(settings):
    """The measurements [{"step", "seconds", "cpu_seconds", "bytes", "megabytes", "handles", "threads"}] of a run."""
    intervals = dict.fromkeys(("eval_interval", "sample_interval", "save_interval"), settings.interval)
    logger = partial(Watched, every=settings.every or settings.steps // 100)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        data, out_dir = os.path.join(folder, "data"), os.path.join(folder, "run")
        c = SETTINGS | intervals | {"max_iters": settings.steps, "log_interval": 10}
        if settings.kind == "fill":
            write_text_dataset(data, TEXT)
            trainer = evaluated_trainer(data, out_dir, logger, **c)
        else:
            trainer = prompt_trainer(write_prompt_dataset(data), out_dir, logger=logger, stop_sequences=("99",),
                                     success_reward="length_penalty", **c)
        with contextlib.redirect_stdout(nowhere):
            trainer.run()
    assert trainer.step == settings.steps and trainer.skipped_steps == 0, trainer.step
    return trainer.logger.measured


def slope(measured, key):
    """By how much `key` grows in 1000 steps, by least squares over the second half."""
    half = measured[len(measured) // 2 :]
    return float(np.polyfit([m["step"] / 1000 for m in half], [m[key] for m in half], 1)[0])


def per_step(measured, key, tenth):
    """The mean growth of `key` in a step of one of the ten parts of a run, from 0."""
    first, last = (measured[min(len(measured) - 1, len(measured) * n // 10)] for n in (tenth, tenth + 1))
    return (last[key] - first[key]) / (last["step"] - first["step"])


def summary(settings, measured):
    """The figures of a run: {name: number}."""
    first, last = measured[0], measured[-1]
    found = {"kind": settings.kind, "steps": settings.steps, "megabytes": last["megabytes"],
             "megabytes_per_1000_steps": slope(measured, "megabytes"), "handles": last["handles"],
             "handles_per_1000_steps": slope(measured, "handles"), "threads": last["threads"],
             "threads_per_1000_steps": slope(measured, "threads"),
             "seconds_per_step": (last["seconds"] - first["seconds"]) / (last["step"] - first["step"]),
             "last_tenth_to_second_in_cpu_time":  # wall time also tells what else the machine does
                 per_step(measured, "cpu_seconds", 9) / per_step(measured, "cpu_seconds", 1),
             "metrics_bytes_per_step": last["bytes"] / last["step"],
             "last_tenth_to_second_in_bytes": per_step(measured, "bytes", 9) / per_step(measured, "bytes", 1)}
    return {name: round(x, 4) if isinstance(x, float) else x for name, x in found.items()}


def growing(found):
    """The names of the figures that should be flat and are not."""
    return [name for name, most in LIMITS.items() if found[name] > most]


def main(argv):
    """Runs, prints, and exits 1 if something grows."""
    settings, _ = load_config(Soak, argv)
    measured = run(settings)
    print("   step  ms/step  cpu ms  memory MB  handles  threads  metrics bytes/step")
    before = measured[0]
    for m in measured[len(measured) // 10 - 1 :: max(1, len(measured) // 10)]:
        steps = max(1, m["step"] - before["step"])
        wall, cpu, size = ((m[key] - before[key]) / steps for key in ("seconds", "cpu_seconds", "bytes"))
        print(f"{m['step']:>7}{1000 * wall:>9.2f}{1000 * cpu:>8.2f}{m['megabytes']:>11.1f}{m['handles']:>9}"
              f"{m['threads']:>9}{size:>20.1f}")
        before = m
    found = summary(settings, measured)
    print(json.dumps(found))
    if names := growing(found):
        raise ValueError(", ".join(f"{name}={found[name]} is above {LIMITS[name]}" for name in names))


if __name__ == "__main__":
    run_script(main)
