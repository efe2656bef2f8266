"""This project's training step and that of TRL on the same work, in turns on one machine."""

import json
import os
from dataclasses import dataclass
from statistics import median

import torch

from core.settings.optional import require
from core.settings.ranges import check_choices, check_ranges
from grpo.benchmarks.peer_ours import our_steps
from grpo.benchmarks.peer_trl import require_trl, trl_steps
from grpo.benchmarks.side import KEEP_MEMORY, Side, in_turns
from grpo.benchmarks.work import CASES, check_names, counted_operations, matmul_peak

SIDES = {"trl": "TRL, best", "ours": "ours", "ours_hf": "ours, same GPT-2"}
PHASES = ("generation", "reference", "training", "step")
WARMUP = 1  # steps of each side that are not counted
ABOUT = """Medians of steps in turns. TRL's best: no gradient checkpointing, up to 16 completions in a forward pass,
no logging, fused AdamW. All sides keep freed memory (MALLOC_* in the environment)."""


@dataclass(frozen=True)
class PeerConfig:
    """The settings of `bench.py peer`."""

    cases: str = ",".join(CASES)  # names of cases: T 4 layers x 128, S 6 x 384; mixed lengths; long prompts
    sides: str = ",".join(SIDES)  # TRL, ours with our model, ours with TRL's GPT-2
    steps: int = 5                # measured steps of each side, in turns; the median is reported
    device: str = "cpu"           # cpu, cuda or mps
    dtype: str = "float32"        # float32 or bfloat16

    def __post_init__(self):
        check_names("cases", self.cases, CASES)
        check_names("sides", self.sides, SIDES)
        check_ranges(self, {"steps": "[1, inf)"})
        check_choices(self, {"device": ("cpu", "cuda", "mps"), "dtype": ("float32", "bfloat16")})


def run_peer(c):
    """Prints a table for each case, and a JSON object with TRL's seconds of a step divided by ours."""
    sides = c.sides.split(",")
    if "trl" in sides:
        require_trl()
    if "ours_hf" in sides:
        require("transformers", "sides=ours_hf")
    print(ABOUT)
    peak = matmul_peak(c.device, getattr(torch, c.dtype))
    result = {}
    for case in c.cases.split(","):
        work = CASES[case]
        measured = in_turns({side: [start(side, work, c)] for side in sides}, WARMUP, c.steps)
        records = {side: [record for record, in found] for side, found in measured.items()}
        print(f"\n{case}: {work.describe()}, {c.device}, {c.dtype}, {os.cpu_count()} cores")
        seconds = report(work, records, peak)
        for side, ending in (("ours", ""), ("ours_hf", "_hf")):
            if "trl" in seconds and side in seconds:
                result[f"ratio_{case}{ending}"] = round(seconds["trl"] / seconds[side], 2)
    print(json.dumps(result))


def start(side, work, c):
    """The child process of a side."""
    if side == "trl":
        return Side(trl_steps, work, c.device, c.dtype, HF_HUB_OFFLINE="1", **KEEP_MEMORY)
    return Side(our_steps, work, side == "ours_hf", {"device": c.device, "dtype": c.dtype}, **KEEP_MEMORY)


def report(work, records, peak):
    """Prints the table of a case. records: {side: those of its steps}. Returns {side: seconds of a step}."""
    steps = len(next(iter(records.values())))
    drawn = [work.lengths(step) for step in range(WARMUP, WARMUP + steps)]
    tokens = median(lengths.sum() for lengths in drawn)
    operations = median(counted_operations(work, lengths) for lengths in drawn)
    seconds = {side: median(r["step"] for r in found) for side, found in records.items()}

    def line(name, values, digits):
        print(f"{name:<22}" + "".join(f"{x:>18.{digits}f}" for x in values))

    print(f"{'':<22}" + "".join(f"{SIDES[side]:>18}" for side in records))
    for phase in PHASES:
        line(f"{phase}, seconds", [median(r[phase] for r in found) for found in records.values()], 3)
    line("tokens per second", [tokens / s for s in seconds.values()], 0)
    line("% of matmul peak", [100 * operations / peak / s for s in seconds.values()], 1)
    line("peak MB", [found[-1]["megabytes"] for found in records.values()], 0)
    print(f"floor {operations / peak:.3f} s: {operations / 1e9:.1f} GFLOP counted, at {peak / 1e9:.0f} GFLOP/s, the "
          f"fastest of the large products before the first case; {tokens:.0f} sampled tokens", flush=True)
    return seconds
