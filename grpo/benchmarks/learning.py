"""TRL and this project learn the same task from the same model, in turns: the reward of each step, and its time.

Both sides read the same prompts in each step and have the same settings; the learning rate is constant.
"""

import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from statistics import mean, median, stdev

from core.config import load_config
from core.distributed import Distributed
from core.settings.optional import require
from core.settings.ranges import check_choices, check_ranges
from grpo.benchmarks.learning_ours import our_steps
from grpo.benchmarks.learning_tools import NEEDS, tool_task
from grpo.benchmarks.learning_trl import trl_steps
from grpo.benchmarks.peer import ENVIRONMENT
from grpo.benchmarks.peer_trl import ROWS
from grpo.benchmarks.side import in_turns
from grpo.build import build_what_is_missing
from grpo.grpo_config import GRPOConfig

PARTS = 5  # rows of the table: means over a fifth of the steps
SIDES = "TRL", "ours"
TASKS = {  # {name: a folder for files -> arguments of grpo/train_grpo.py}
    "sums": lambda folder: [os.path.join("config", "grpo_smollm2.py")],
    "tools": tool_task,
}


@dataclass(frozen=True)
class LearningConfig:
    """The settings of `bench.py learning`."""

    task: str = "sums"   # sums: SmolLM2 and config/grpo_smollm2.py; tools: a small Llama that calls a calculator
    steps: int = 40      # steps of each side, in turns
    seeds: int = 1       # the seeds are 1 to this number
    batch_size: int = 8  # problems of a step
    group_size: int = 8  # completions of a problem

    def __post_init__(self):
        check_choices(self, {"task": TASKS})
        check_ranges(self, {"steps": f"[{PARTS}, 1e6]", "seeds": "[1, 1e3]", "batch_size": "[1, 1e3]",
                            "group_size": "[2, 1e3]"})
        rows = self.batch_size * self.group_size
        if rows > ROWS and rows % ROWS:
            raise ValueError(f"batch_size={self.batch_size} * group_size={self.group_size} must be at most {ROWS} or a "
                             f"multiple of it, since TRL reads {ROWS} completions at a time")


def run_learning(c):
    """Prints the rewards of both sides, mean ± sd over the seeds, and a JSON object with those of each seed and step.
    """
    require("trl", *NEEDS)
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        config, _ = load_config(GRPOConfig, TASKS[c.task](folder))
        config = replace(config, batch_size=c.batch_size, group_size=c.group_size, max_iters=c.steps)
        build_what_is_missing(config, Distributed(config.device, config.dtype))
        seeds = []
        for seed in range(1, c.seeds + 1):
            of_seed = replace(config, seed=seed)
            seeds.append(in_turns([(trl_steps, of_seed), (our_steps, of_seed)], c.steps))
            print(f"seed {seed} of {c.seeds} is done", file=sys.stderr)
    report(seeds)


def report(seeds):
    """Prints the table. seeds: for each seed the records of TRL's steps and of ours, {"seconds", "reward"}"""
    result = {}
    for i, side in enumerate(SIDES):
        rewards = [[round(step["reward"], 4) for step in sides[i]] for sides in seeds]
        seconds = median(step["seconds"] for sides in seeds for step in sides[i])
        shown = ""
        for x in zip(*map(parts, rewards), strict=True):
            deviation = stdev(x) if len(x) > 1 else 0.0
            shown += f"  {mean(x):.3f} ± {deviation:.3f}"
        print(f"{side:<6}{seconds:>8.2f} s a step; mean reward of each fifth of the steps:{shown}")
        result[side] = {"seconds": round(seconds, 3), "rewards": rewards}
    result["ratio"] = round(result["TRL"]["seconds"] / result["ours"]["seconds"], 2)
    print(json.dumps(result))


def parts(rewards):
    """The mean of each of PARTS parts of a list, the last of which may be longer."""
    size = len(rewards) // PARTS
    starts = [i * size for i in range(PARTS)]
    ends = [*starts[1:], len(rewards)]
    return [mean(rewards[start:end]) for start, end in zip(starts, ends, strict=True)]
