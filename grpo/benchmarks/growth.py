"""Measures how time and memory of a causal training step grow, what fits into a memory, what a second rank gains."""

import json
import os
import socket
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from grpo.benchmarks.peer_ours import our_steps
from grpo.benchmarks.side import Side, in_turns
from grpo.benchmarks.work import Work, check_names

GIGABYTES = (2, 8, 24)
WARMUP, STEPS = 1, 2  # steps that are not counted, and that are
BASE = Work()         # the step from which one size at a time is changed
TINY = Work(n_layer=1, n_head=1, n_embd=16, batch_size=2, group_size=2, completion_length=4)
MODELS = ((4, 4, 64), (4, 4, 128), (6, 6, 192), (6, 6, 384), (8, 8, 512), (10, 10, 640))  # layers, heads, width
AXES = {  # {axis: (title, the attribute of a Work that is the size, the changed settings, the smallest first)}
    "group_size": ("completions of a prompt", "group_size", [{"group_size": G} for G in (2, 4, 8, 16, 32, 64)]),
    "length": ("tokens of a completion", "completion_length",
               [{"completion_length": M} for M in (64, 128, 256, 512, 1024)]),
    "model": ("parameters of the layers", "parameters",
              [dict(zip(("n_layer", "n_head", "n_embd"), sizes, strict=True)) for sizes in MODELS]),
    "vocabulary": ("tokens of the vocabulary", "vocab_size",
                   [{"vocab_size": V} for V in (100, 1000, 10_000, 50_000, 150_000)])}


@dataclass(frozen=True)
class GrowthConfig:
    """The settings of `bench.py growth`."""

    axes: str = ",".join((*AXES, "ranks"))  # what grows: completions of a prompt, their length, the model, its
                                            # vocabulary; ranks: two ranks of one core each against one
    picture: str | None = None              # the file of the plots, such as docs/growth.png
    device: str = "cpu"                     # cpu, cuda or mps; ranks always use the CPU

    def __post_init__(self):
        check_names("axes", self.axes, (*AXES, "ranks"))
        folder = os.path.dirname(self.picture or "") or "."
        if not os.path.isdir(folder):
            raise ValueError(f"picture={self.picture}: the folder {folder} does not exist; create it")


def run_growth(c):
    """Prints a table for each axis, what fits, and the JSON object of exponents; draws the picture."""
    chosen = c.axes.split(",")
    process = measure(TINY, c)["megabytes"]
    print(f"{BASE.describe()}\na process with a tiny model takes {process:.0f} MB, which fits leave out")
    result, measured = {}, []
    for name, (title, size_of, changes) in AXES.items():
        if name not in chosen:
            continue
        works = [replace(BASE, **change) for change in changes]
        sizes = [getattr(work, size_of) for work in works]
        growth = Growth(title, sizes, [measure(work, c) for work in works], process)
        growth.print_table()
        measured.append(growth)
        result[f"{name}_time_exponent"] = growth.exponent("seconds")
        result[f"{name}_memory_exponent"] = growth.exponent("megabytes")
    if measured:
        print_fits(measured)
    if "ranks" in chosen:
        result["two_ranks"] = measure_ranks()
    print(json.dumps(result), flush=True)
    if measured and c.picture:
        draw(measured, c.picture)


def measure(work, c):
    """Seconds of a step, tokens per second, and the peak memory of the process, which is the step's own."""
    side = Side(our_steps, work, False, {"device": c.device, "dtype": "float32"})
    records = [record for record, in in_turns({"ours": [side]}, WARMUP, STEPS)["ours"]]
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
        """Seconds, or megabytes beyond those of a process with a tiny model; memory may not grow at all."""
        before = self.process if name == "megabytes" else 0.0
        return [max(1e-3, point[name] - before) for point in self.points]

    def exponent(self, name):
        """p of value = constant * size^p, over the upper half of the sizes."""
        upper = slice(-(len(self.sizes) // 2) - 1, None)
        slope, _ = np.polyfit(np.log(self.sizes[upper]), np.log(self.values(name)[upper]), 1)
        return round(float(slope), 2)

    def fits(self, megabytes):
        """The largest size whose step fits, in words, and the smallest measured one that does not."""
        for i, point in enumerate(self.points):
            if point["megabytes"] > megabytes:
                smaller = f"{self.sizes[i - 1]:,}" if i else "none"
                return f"{smaller}, not {self.sizes[i]:,} (measured)"
        exponent = max(1.0, self.exponent("megabytes"))  # in the end weights and activations grow with the size
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


def measure_ranks():
    """Prints the time of the same step on one rank of one core and on two. Returns how many times faster two are."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    teams = {"one": [rank_side(0, 1, port)], "two": [rank_side(rank, 2, port) for rank in (0, 1)]}
    measured = in_turns(teams, WARMUP, STEPS)
    one, two = (median(max(r["step"] for r in records) for records in found) for found in measured.values())
    memory = {name: " and ".join(f"{r['megabytes']:.0f} MB" for r in found[-1]) for name, found in measured.items()}
    print(f"\nthe same step in float32 on one rank of one core {one:.3g} s, on two {two:.3g} s: {one / two:.2f} times "
          f"faster; peak memory {memory['one']} on the one, {memory['two']} on the two")
    return round(one / two, 2)


def rank_side(rank, world, port):
    """A rank of one thread, with its share of the work."""
    settings = {"device": "cpu", "dtype": "float32", "batch_size": BASE.batch_size // world}
    return Side(our_steps, BASE, False, settings, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")


def draw(measured, path):
    """Draws seconds in the upper row and memory in the lower one, with a panel for each axis; a row has one scale, and
    the dotted lines are growth in proportion to the size."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, panels = plt.subplots(2, len(measured), figsize=(3.5 * len(measured), 7), sharey="row", squeeze=False)
    for row, name, label in zip(panels, ("seconds", "megabytes"), ("seconds of a step", "peak MB"), strict=True):
        row[0].set_ylabel(label)
        for panel, growth in zip(row, measured, strict=True):
            heights = [point[name] for point in growth.points]
            linear = [heights[0] * size / growth.sizes[0] for size in growth.sizes]
            panel.loglog(growth.sizes, heights, marker=".")
            panel.loglog(growth.sizes, linear, ":", color="grey")
            panel.set(title=f"exponent {growth.exponent(name)}", xlabel=growth.title)
            panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
