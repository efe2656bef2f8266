"""This project's training step and that of TRL on the same work, in turns on one machine."""

import dataclasses
import json
import os
from dataclasses import dataclass
from statistics import median

import torch

from core.distributed import detect_device, detect_dtype
from core.settings.optional import require
from core.settings.ranges import check_ranges
from grpo.benchmarks.peer_ours import our_steps
from grpo.benchmarks.peer_trl import require_trl, trl_steps
from grpo.benchmarks.side import KEEP_MEMORY, Side, in_turns
from grpo.benchmarks.work import CASES, counted_operations, matmul_peak

SIDES = {"trl": "TRL, best", "ours": "ours", "ours_hf": "ours, same GPT-2"}
PHASES = ("generation", "reference", "policy", "optimizer", "rest", "step")
ABOUT = """Medians of steps in turns. TRL's best: no gradient checkpointing, up to 16 completions in a forward pass,
no logging, fused AdamW. All sides keep freed memory (MALLOC_* in the environment)."""


@dataclass(frozen=True)
class PeerConfig:
    """What `bench.py peer` measures."""

    cases: str = ",".join(CASES)        # names of cases: T 4 layers x 128, S 6 x 384; mixed lengths; long prompts
    sides: str = ",".join(SIDES)        # TRL, ours with our model, ours with TRL's GPT-2
    warmup: int = 1                     # steps of each side that are not counted
    steps: int = 5                      # measured steps of each side, in turns; the median is reported
    device: str = "cpu"                 # auto (cuda, else mps, else cpu), cpu, cuda, mps
    dtype: str = "float32"              # auto, float32 or bfloat16
    # other sizes than those of the cases
    n_layer: int | None = None
    n_head: int | None = None
    n_embd: int | None = None
    vocab_size: int | None = None
    batch_size: int | None = None         # prompts
    group_size: int | None = None         # completions of each
    prompt_length: int | None = None
    completion_length: int | None = None  # tokens of a completion, at most

    def __post_init__(self):
        check_names("cases", self.cases, CASES)
        check_names("sides", self.sides, SIDES)
        check_ranges(self, {"warmup": "[0, inf)", "steps": "[1, inf)"})
        for name in self.cases.split(","):
            chosen_work(CASES[name], self)


def check_names(key, names, known):
    """Raises ValueError if one of the names, separated by commas, is not known."""
    for name in names.split(","):
        if name not in known:
            raise ValueError(f"{key}: {name!r} is not one of {', '.join(known)}")


def chosen_work(work, config):
    """The work with the sizes that the config sets."""
    set_sizes = {}
    for field in dataclasses.fields(work):
        size = getattr(config, field.name, None)
        if size is not None:
            set_sizes[field.name] = size
    return dataclasses.replace(work, **set_sizes)


def detected(c):
    """The config with the device and the precision that auto means on this machine: all sides get the same."""
    device = detect_device(c.device)
    return dataclasses.replace(c, device=str(device), dtype=str(detect_dtype(c.dtype, device)).removeprefix("torch."))


def run_peer(c):
    """Prints a table for each case, and a JSON object with TRL's seconds of a step divided by ours."""
    c = detected(c)
    sides = c.sides.split(",")
    if "trl" in sides:
        require_trl()
    if "ours_hf" in sides:
        require("transformers", "sides=ours_hf")
    print(ABOUT)
    peak = matmul_peak(c.device, getattr(torch, c.dtype))
    result = {}
    for case in c.cases.split(","):
        work = chosen_work(CASES[case], c)
        measured = in_turns({side: [start(side, work, c)] for side in sides}, c.warmup, c.steps)
        records = {side: [record for record, in found] for side, found in measured.items()}
        print(f"\n{case}: {work.describe()}, {c.device}, {c.dtype}, {os.cpu_count()} cores")
        seconds = report(work, records, peak, c)
        for side, ending in (("ours", ""), ("ours_hf", "_hf")):
            if "trl" in seconds and side in seconds:
                result[f"ratio_{case}{ending}"] = round(seconds["trl"] / seconds[side], 2)
    print(json.dumps(result))


def start(side, work, c):
    """The child process of a side."""
    if side == "trl":
        return Side(trl_steps, work, c.device, c.dtype, HF_HUB_OFFLINE="1", **KEEP_MEMORY)
    return Side(our_steps, work, side == "ours_hf", {"device": c.device, "dtype": c.dtype}, **KEEP_MEMORY)


def report(work, records, peak, c):
    """Prints the table of a case. Returns {side: seconds of a step}."""
    drawn = [work.lengths(step) for step in range(c.warmup, c.warmup + c.steps)]
    tokens = median(lengths.sum() for lengths in drawn)
    operations = median(counted_operations(work, lengths) for lengths in drawn)
    whole = {side: median(r["step"] for r in found) for side, found in records.items()}

    def line(name, values, digits):
        print(f"{name:<22}" + "".join(f"{x:>18.{digits}f}" for x in values))

    print(f"{'':<22}" + "".join(f"{SIDES[side]:>18}" for side in records))
    for phase in PHASES:
        line(f"{phase}, seconds", [median(r.get(phase, 0.0) for r in found) for found in records.values()], 3)
    line("fastest step", [min(r["step"] for r in found) for found in records.values()], 3)
    line("slowest step", [max(r["step"] for r in found) for found in records.values()], 3)
    line("tokens per second", [tokens / s for s in whole.values()], 0)
    line("% of matmul peak", [100 * operations / peak / s for s in whole.values()], 1)
    line("peak MB", [found[-1]["megabytes"] for found in records.values()], 0)
    print(f"floor {operations / peak:.3f} s: {operations / 1e9:.1f} GFLOP counted, at {peak / 1e9:.0f} GFLOP/s, the "
          f"fastest of the large products before the first case; {tokens:.0f} sampled tokens", flush=True)
    return whole
