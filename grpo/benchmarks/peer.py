"""This project's training step and that of TRL on the same work, in turns on one machine."""

import json
import os
from dataclasses import dataclass
from statistics import median

import torch

from core.settings.optional import require
from core.settings.ranges import check_choices, check_ranges
from grpo.benchmarks.peer_ours import our_steps
from grpo.benchmarks.peer_trl import NEEDS, trl_steps
from grpo.benchmarks.side import in_turns
from grpo.benchmarks.work import CASES, counted_operations, matmul_peak

NAMES = ("TRL, best", "ours", "ours, same GPT-2")
WARMUP = 1  # steps of each side that are not counted
ENVIRONMENT = {  # of the children: large blocks of memory stay with the process. glibc reads this when one starts
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
    "HF_HUB_OFFLINE": "1"}
ABOUT = """Medians of steps in turns. TRL's best: no gradient checkpointing, up to 16 completions in a forward pass,
no logging, fused AdamW. All sides keep freed memory (MALLOC_* in the environment)."""


@dataclass(frozen=True)
class PeerConfig:
    """The settings of `bench.py peer`."""

    cases: str = ",".join(CASES)  # names of cases: T 4 layers x 128, S 6 x 384; mixed lengths; long prompts
    steps: int = 5                # measured steps of each side, in turns; the median is reported
    device: str = "cpu"           # cpu, cuda or mps
    dtype: str = "float32"        # float32 or bfloat16

    def __post_init__(self):
        for case in self.cases.split(","):
            if case not in CASES:
                raise ValueError(f"cases: {case!r} is not one of {', '.join(CASES)}")
        check_ranges(self, {"steps": "[1, inf)"})
        check_choices(self, {"device": ("cpu", "cuda", "mps"), "dtype": ("float32", "bfloat16")})


def run_peer(c):
    """Prints a table for each case, and a JSON object with TRL's seconds of a step divided by ours."""
    require("trl", *NEEDS)
    os.environ.update(ENVIRONMENT)
    print(ABOUT)
    peak = matmul_peak(c.device, getattr(torch, c.dtype))
    result = {}
    for case in c.cases.split(","):
        work = CASES[case]
        calls = (
            (trl_steps, work, c.device, c.dtype),
            (our_steps, work, c.device, c.dtype, False),
            (our_steps, work, c.device, c.dtype, True))
        records = in_turns(calls, WARMUP + c.steps)
        print(f"\n{case}: {work}, {c.device}, {c.dtype}, {os.cpu_count()} cores")
        trl, ours, same_model = report(work, [found[WARMUP:] for found in records], peak)
        result[f"ratio_{case}"] = round(trl / ours, 2)
        result[f"ratio_{case}_hf"] = round(trl / same_model, 2)
    print(json.dumps(result))


def report(work, records, peak):
    """Prints the table of a case. records: for each side those of its steps. Returns the seconds of a step of each."""
    drawn = [work.lengths(step) for step in range(WARMUP, WARMUP + len(records[0]))]
    tokens = median(lengths.sum() for lengths in drawn)
    operations = median(counted_operations(work, lengths) for lengths in drawn)
    seconds = [median(record["seconds"] for record in found) for found in records]

    def line(name, values, digits):
        print(f"{name:<22}" + "".join(f"{x:>18.{digits}f}" for x in values))

    print(f"{'':<22}" + "".join(f"{name:>18}" for name in NAMES))
    line("seconds of a step", seconds, 3)
    line("tokens per second", [tokens / s for s in seconds], 0)
    line("% of matmul peak", [100 * operations / peak / s for s in seconds], 1)
    line("peak MB", [found[-1]["megabytes"] for found in records], 0)
    print(f"floor {operations / peak:.3f} s: {operations / 1e9:.1f} GFLOP counted, at {peak / 1e9:.0f} GFLOP/s, the "
          f"fastest of the large products before the first case; {tokens:.0f} sampled tokens", flush=True)
    return seconds
