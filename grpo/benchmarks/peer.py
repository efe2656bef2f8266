"""This project's training step and that of TRL on the same work, in turns on one machine."""

import dataclasses
import json
import os
from dataclasses import dataclass
from statistics import median

import torch

from core.distributed import detect_device, detect_dtype
from core.settings.optional import require
from grpo.benchmarks.peer_ours import our_steps
from grpo.benchmarks.peer_trl import environment, require_trl, trl_steps
from grpo.benchmarks.side import KEEP_MEMORY, Side, in_turns
from grpo.benchmarks.work import CASES, counted_operations, matmul_peak

SIDES = {"trl": "TRL, best", "trl_default": "TRL, default", "ours": "ours", "ours_hf": "ours, same GPT-2"}
PHASES = ("generation", "reference", "policy", "optimizer", "rest", "step")


@dataclass(frozen=True)
class PeerConfig:
    """What `bench.py peer` measures."""

    cases: str = ",".join(CASES)        # names of cases: T 4 layers x 128, S 6 x 384; mixed lengths; long prompts
    sides: str = ",".join(SIDES)        # TRL at its best and by default, ours with our model and with TRL's GPT-2
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
        for key, known in (("cases", CASES), ("sides", SIDES)):
            for name in getattr(self, key).split(","):
                if name not in known:
                    raise ValueError(f"{key}: {name!r} is not one of {', '.join(known)}")
        for key, least in (("warmup", 0), ("steps", 1)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)} must be at least {least}")
        for name in self.cases.split(","):
            chosen_work(CASES[name], self)


def chosen_work(work, config):
    """The work with the sizes that the config sets."""
    sizes = {f.name: x for f in dataclasses.fields(work) if (x := getattr(config, f.name, None)) is not None}
    return dataclasses.replace(work, **sizes)


def detected(c):
    """The config with the device and the precision that auto means on this machine: all sides get the same."""
    device = detect_device(c.device)
    return dataclasses.replace(c, device=str(device), dtype=str(detect_dtype(c.dtype, device)).removeprefix("torch."))


def run_peer(c):
    """Prints a table for each case, and a JSON object with TRL's seconds of a step divided by ours."""
    c, sides, result = detected(c), c.sides.split(","), {}
    if any(name.startswith("trl") for name in sides):
        require_trl()
    if "ours_hf" in sides:
        require("transformers", "sides=ours_hf")
    print("Medians of steps in turns. TRL's best: no gradient checkpointing, up to 16 completions in a forward pass,\n"
          "no logging, fused AdamW. It and both of ours run with the environment variables "
          f"{' '.join(f'{k}={v}' for k, v in KEEP_MEMORY.items())}.\n"
          "TRL's default runs without, so ratio_*_default divides TRL without these variables by ours with them.")
    peak = matmul_peak(c.device, getattr(torch, c.dtype))
    for name in c.cases.split(","):
        work = chosen_work(CASES[name], c)
        records = in_turns({side: start(side, work, c) for side in sides}, c.warmup, c.steps)
        print(f"\n{name}: {work.describe()}, {c.device}, {c.dtype}, {os.cpu_count()} cores")
        seconds = report(work, records, peak, c)
        result |= ratios(name, seconds)
    print(json.dumps(result))


def start(side, work, c):
    """The child process of a side."""
    if side.startswith("trl"):
        return Side(trl_steps, work, side == "trl", c.device, c.dtype, **environment(side == "trl"))
    return Side(our_steps, work, side == "ours_hf", {"device": c.device, "dtype": c.dtype}, **KEEP_MEMORY)


def report(work, records, peak, c):
    """Prints the table of a case. Returns {side: seconds of a step}."""
    steps = range(c.warmup, c.warmup + c.steps)
    tokens = median(work.lengths(step).sum() for step in steps)
    operations = median(counted_operations(work, work.lengths(step)) for step in steps)
    seconds = {side: {phase: median(r.get(phase, 0.0) for r in found) for phase in PHASES}
               for side, found in records.items()}
    whole = {side: found["step"] for side, found in seconds.items()}
    lines = {f"{phase}, seconds": ([found[phase] for found in seconds.values()], 3) for phase in PHASES}
    lines |= {"fastest step": ([min(r["step"] for r in found) for found in records.values()], 3),
              "slowest step": ([max(r["step"] for r in found) for found in records.values()], 3),
              "tokens per second": ([tokens / s for s in whole.values()], 0),
              "% of matmul peak": ([100 * operations / peak / s for s in whole.values()], 1),
              "peak MB": ([found[-1]["megabytes"] for found in records.values()], 0)}
    print(f"{'':<22}" + "".join(f"{SIDES[side]:>18}" for side in records))
    for name, (values, digits) in lines.items():
        print(f"{name:<22}" + "".join(f"{x:>18.{digits}f}" for x in values))
    print(f"floor {operations / peak:.3f} s: {operations / 1e9:.1f} GFLOP counted, at {peak / 1e9:.0f} GFLOP/s, the "
          f"fastest of the large products before the first case; {tokens:.0f} sampled tokens", flush=True)
    return whole


def ratios(name, seconds):
    """Entries of the JSON object: TRL's seconds over ours."""
    pairs = {f"ratio_{name}": ("trl", "ours"), f"ratio_{name}_hf": ("trl", "ours_hf"),
             f"ratio_{name}_default": ("trl_default", "ours")}
    return {key: round(seconds[theirs] / seconds[our], 2) for key, (theirs, our) in pairs.items()
            if theirs in seconds and our in seconds}
