"""How the time and the memory of a causal training step grow, what fits into a memory, and what a second rank gains."""

import dataclasses
import json
import os
import socket
from dataclasses import dataclass
from statistics import median

import numpy as np

from core.settings.ranges import check_ranges
from grpo.benchmarks.peer import check_names, chosen_work, detected
from grpo.benchmarks.peer_ours import our_steps
from grpo.benchmarks.side import Side, in_turns
from grpo.benchmarks.work import Work

GIGABYTES = (2, 8, 24)


@dataclass(frozen=True)
class Axis:
    """A size of the step that grows."""
    title: str
    size_of: str    # the attribute of a Work that is the size
    changes: list   # settings of each Work, the smallest first


AXES = {
    "group_size": Axis("completions of a prompt", "group_size", [{"group_size": G} for G in (2, 4, 8, 16, 32, 64)]),
    "length": Axis("tokens of a completion", "completion_length",
                   [{"completion_length": M} for M in (64, 128, 256, 512, 1024)]),
    "model": Axis("parameters of the layers", "parameters", [
        {"n_layer": 4, "n_head": 4, "n_embd": 64}, {"n_layer": 4, "n_head": 4, "n_embd": 128},
        {"n_layer": 6, "n_head": 6, "n_embd": 192}, {"n_layer": 6, "n_head": 6, "n_embd": 384},
        {"n_layer": 8, "n_head": 8, "n_embd": 512}, {"n_layer": 10, "n_head": 10, "n_embd": 640}]),
    "vocabulary": Axis("tokens of the vocabulary", "vocab_size",
                       [{"vocab_size": V} for V in (100, 1000, 10_000, 50_000, 150_000)])}


@dataclass(frozen=True)
class GrowthConfig:
    """What `bench.py growth` measures, and the step from which one size at a time is changed."""

    axes: str = ",".join((*AXES, "ranks"))  # what grows: completions of a prompt, their length, the model, its
                                            # vocabulary; ranks: two ranks of one core each against one
    warmup: int = 1                         # steps that are not counted
    steps: int = 2                          # measured steps; the median is reported
    points: int = 6                         # sizes on an axis, the smallest first
    picture: str | None = None              # the file of the plots, such as docs/growth.png
    device: str = "cpu"                     # auto (cuda, else mps, else cpu), cpu, cuda, mps; ranks always use the CPU
    dtype: str = "float32"                  # auto, float32 or bfloat16; ranks always compute in float32
    # the step
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    batch_size: int = 8                     # prompts
    group_size: int = 8                     # completions of each
    prompt_length: int = 32
    completion_length: int = 64             # tokens of a completion

    def __post_init__(self):
        check_names("axes", self.axes, (*AXES, "ranks"))
        check_ranges(self, {"warmup": "[0, inf)", "steps": "[1, inf)", "points": "[2, inf)"})
        chosen_work(Work(), self)
        if "ranks" in self.axes.split(",") and self.batch_size % 2:
            raise ValueError(f"batch_size={self.batch_size} must be even: axes=ranks gives half of it to each rank")
        folder = os.path.dirname(self.picture or "") or "."
        if not os.path.isdir(folder):
            raise ValueError(f"picture={self.picture}: the folder {folder} does not exist; create it")


def run_growth(c):
    """Prints a table for each axis, what fits, and the JSON object of exponents; draws the picture."""
    c = detected(c)
    base = chosen_work(Work(), c)
    chosen = c.axes.split(",")
    tiny = measure(Work(n_layer=1, n_head=1, n_embd=16, batch_size=2, group_size=2, completion_length=4), c)
    print(f"{base.describe()}\na process with a tiny model takes {tiny['megabytes']:.0f} MB, which fits leave out")
    result, measured = {}, []
    for name in chosen:
        if name == "ranks":
            continue
        works = [dataclasses.replace(base, **change) for change in AXES[name].changes[: c.points]]
        sizes = [getattr(work, AXES[name].size_of) for work in works]
        growth = Growth(AXES[name].title, sizes, [measure(work, c) for work in works], tiny["megabytes"])
        growth.print_table()
        measured.append(growth)
        result[f"{name}_time_exponent"] = growth.exponent("seconds")
        result[f"{name}_memory_exponent"] = growth.exponent("megabytes")
    if measured:
        print_fits(measured)
    if "ranks" in chosen:
        result["two_ranks"] = measure_ranks(base, c)
    print(json.dumps(result), flush=True)
    if measured and c.picture:
        draw(measured, c.picture)


def measure(work, c):
    """Seconds of a step, tokens per second, and the peak memory of the process, which is the step's own."""
    side = Side(our_steps, work, False, {"device": c.device, "dtype": c.dtype})
    records = [record for record, in in_turns({"ours": [side]}, c.warmup, c.steps)["ours"]]
    seconds = median(r["step"] for r in records)
    return {"seconds": seconds, "tokens": work.lengths(0).sum() / seconds, "megabytes": records[-1]["megabytes"]}


@dataclass
class Growth:
    """Time and memory over the sizes of one axis."""
    title: str
    sizes: list
    points: list      # what `measure` returned for each size
    process: float    # megabytes of a process with a tiny model

    def values(self, name):
        """Seconds, or megabytes beyond those of a process with a tiny model."""
        before = self.process if name == "megabytes" else 0.0
        return [point[name] - before for point in self.points]

    def exponent(self, name):
        """p of value = constant * size^p, over the upper half of the sizes; None where memory does not grow."""
        half = len(self.sizes) // 2
        sizes, values = self.sizes[-half - 1 :], self.values(name)[-half - 1 :]
        if min(values) <= 0:
            return None
        return round(float(np.polyfit(np.log(sizes), np.log(values), 1)[0]), 2)

    def fits(self, megabytes):
        """The largest size whose step fits, in words, and the smallest measured one that does not."""
        too_large = [i for i, point in enumerate(self.points) if point["megabytes"] > megabytes]
        if too_large:
            i = too_large[0]
            if i == 0:
                return f"less than {self.sizes[0]:,} (measured)"
            return f"{self.sizes[i - 1]:,}, not {self.sizes[i]:,} (measured)"
        exponent = self.exponent("megabytes")
        if exponent is None:
            return f"{self.sizes[-1]:,} (measured), and more"
        exponent = max(1.0, exponent)  # in the end weights and activations grow at least as fast as the size
        times = ((megabytes - self.process) / self.values("megabytes")[-1]) ** (1 / exponent)
        two_digits = float(f"{self.sizes[-1] * times:.2g}")
        return f"{two_digits:,.0f} (extrapolated)"

    def print_table(self):
        print(f"\n| {self.title} | seconds | tokens per second | peak MB |\n|---|---|---|---|")
        for size, p in zip(self.sizes, self.points, strict=True):
            print(f"| {size:,} | {p['seconds']:.3g} | {p['tokens']:.0f} | {p['megabytes']:.0f} |")
        print(f"| exponent, upper half | {self.exponent('seconds')} | | {self.exponent('megabytes')} |", flush=True)


def print_fits(measured):
    print("\n| fits in | " + " | ".join(f"{size} GB" for size in GIGABYTES) + " |")
    print("|" + "---|" * (1 + len(GIGABYTES)))
    for growth in measured:
        print(f"| {growth.title} | " + " | ".join(growth.fits(1024 * size) for size in GIGABYTES) + " |")


def measure_ranks(base, c):
    """Prints the time of the same step on one rank of one core and on two. Returns how many times faster two are."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    teams = {"one": [rank_side(base, 0, 1, port)], "two": [rank_side(base, rank, 2, port) for rank in (0, 1)]}
    measured = in_turns(teams, c.warmup, c.steps)
    one, two = (median(max(r["step"] for r in records) for records in found) for found in measured.values())
    memory = {name: " and ".join(f"{r['megabytes']:.0f} MB" for r in found[-1]) for name, found in measured.items()}
    print(f"\nthe same step in float32 on one rank of one core {one:.3g} s, on two {two:.3g} s: {one / two:.2f} times "
          f"faster; peak memory {memory['one']} on the one, {memory['two']} on the two")
    return round(one / two, 2)


def rank_side(work, rank, world, port):
    """A rank of one thread, with its share of the work."""
    settings = {"device": "cpu", "dtype": "float32", "batch_size": work.batch_size // world}
    return Side(our_steps, work, False, settings, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")


def draw(measured, path):
    """Draws seconds in the upper row and memory in the lower one, with a panel for each axis; a row has one scale."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, panels = plt.subplots(2, len(measured), figsize=(3.5 * len(measured), 7), sharey="row", squeeze=False)
    rows = {"seconds": "seconds of a step",
            "megabytes": f"peak MB of the process\n(the exponents leave out {measured[0].process:.0f} MB)"}
    for row, (name, label) in zip(panels, rows.items(), strict=True):
        row[0].set_ylabel(label)
        for panel, growth in zip(row, measured, strict=True):
            heights = [point[name] for point in growth.points]
            linear = [heights[0] * size / growth.sizes[0] for size in growth.sizes]
            panel.loglog(growth.sizes, heights, marker=".")
            panel.loglog(growth.sizes, linear, ":", color="grey", label="in proportion")
            panel.set_title(f"exponent {growth.exponent(name)}", fontsize=10)
            panel.set_xlabel(growth.title)
            panel.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
