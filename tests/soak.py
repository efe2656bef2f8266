"""A long run stays flat: memory, file handles, threads, time of a step, size of its metrics.

python tests/soak.py --kind=fill --steps=10000
python tests/soak.py --kind=causal --steps=10000
A run of tiny models in this process (Linux alone), with evaluations, samples and states. Prints one JSON object; exits
1 if memory, handles or threads grow, or steps get slower, or records of metrics larger.
"""

import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time
from dataclasses import dataclass
from unittest import mock

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from core.config import load_config
from core.errors import run_script
from core.logger import Logger
from core.settings.setting import Settings
from grpo import train_grpo
from tests.kill import GRPO, kinds

LIMITS = {"megabytes": 0.5, "handles": 0, "threads": 0,  # less than half a megabyte is the allocator's noise
          "cpu_seconds": 1.5, "bytes": 1.2}               # a shared machine changes the time by a fifth


@dataclass(frozen=True)
class Soak(Settings):
    """The settings of this script."""
    kind: str = "fill"  # fill or causal
    steps: int = 10_000  # optimizer steps
    every: int = 100  # steps between two measurements, and between two evaluations, sets of samples and states


def run(settings):
    """The measurements [{"step", "cpu_seconds", "bytes", "megabytes", "handles", "threads"}] of a run."""
    measured, tick, process = [], Logger.tick, pathlib.Path("/proc/self")

    def watched(logger):
        tick(logger)
        logger.done = getattr(logger, "done", 0) + 1
        if logger.done % settings.every == 0:
            pages = int((process / "statm").read_text().split()[1])
            measured.append({
                "step": logger.done, "cpu_seconds": time.process_time(), "bytes": os.path.getsize(logger.path),
                "megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                "handles": len(os.listdir(process / "fd")), "threads": len(os.listdir(process / "task"))})

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), mock.patch.object(Logger, "tick", watched):
            _, of_kind, _ = kinds(pathlib.Path(folder))[settings.kind]
            intervals = dict.fromkeys(("eval_interval", "sample_interval", "save_interval"), settings.every)
            # The learning rate is so small that completions keep their lengths: every step is alike
            values = GRPO | of_kind | intervals | {"max_iters": settings.steps, "out_dir": f"{folder}/run",
                                                   "learning_rate": 1e-6, "min_lr": 1e-7, "log_interval": 10}
            train_grpo.main([f"--{key}={value}" for key, value in values.items()])
    return measured


def growth(measured):
    """Of memory, handles and threads the growth in 1000 steps of the last third of a run; of time and bytes, that of
    the last third in times that of the second."""
    first, second, last = (measured[len(measured) * n // 3 - 1] for n in (1, 2, 3))
    steps = (last["step"] - second["step"]) / 1000
    found = {name: (last[name] - second[name]) / steps for name in ("megabytes", "handles", "threads")}
    for name in ("cpu_seconds", "bytes"):  # wall time also tells what else the machine does
        found[name] = (last[name] - second[name]) / (second[name] - first[name])
    return found


def main(argv):
    """Runs, prints, and exits 1 if something grows."""
    measured = run(load_config(Soak, argv)[0])
    found = growth(measured)
    print(json.dumps({"end": measured[-1], "growth": found}, indent=1))
    if growing := [name for name, most in LIMITS.items() if found[name] > most]:
        raise ValueError(f"too much growth of {', '.join(growing)}")


if __name__ == "__main__":
    run_script(main)
