"""How the time and the memory of a causal training step grow, what fits into a memory, and what a second rank gains."""

import dataclasses
import json
import math
import os
import socket
from dataclasses import dataclass
from statistics import median

import numpy as np

from grpo.benchmarks.peer import chosen_work, detected
from grpo.benchmarks.peer_ours import our_steps
from grpo.benchmarks.side import Side, in_turns
from grpo.benchmarks.work import Work

SHAPES = ((4, 4, 64), (4, 4, 128), (6, 6, 192), (6, 6, 384), (8, 8, 512), (10, 10, 640))  # layers, heads, width
AXES = {"group_size": [{"group_size": G} for G in (2, 4, 8, 16, 32, 64)],
        "length": [{"completion_length": M} for M in (64, 128, 256, 512, 1024)],
        "model": [dict(zip(("n_layer", "n_head", "n_embd"), shape, strict=True)) for shape in SHAPES],
        "vocabulary": [{"vocab_size": V} for V in (100, 1000, 10_000, 50_000, 150_000)]}
COUNTED = {"group_size": lambda work: work.group_size, "length": lambda work: work.completion_length,
           "model": lambda work: work.parameters, "vocabulary": lambda work: work.vocab_size}
TITLES = {"group_size": "completions of a prompt", "length": "tokens of a completion",
          "model": "parameters of the layers", "vocabulary": "tokens of the vocabulary"}
LABELS = {"seconds": "seconds of a step", "megabytes": "peak MB of the process"}
GIGABYTES = (2, 8, 24)
FAR = 100  # a memory fit says nothing about sizes so many times larger than the largest measured one


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
        for name in self.axes.split(","):
            if name not in (*AXES, "ranks"):
                raise ValueError(f"axes: {name!r} is not one of {', '.join(AXES)}, ranks")
        for key, least in (("warmup", 0), ("steps", 1), ("points", 2)):
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)} must be at least {least}")
        chosen_work(Work(), self)
        if "ranks" in self.axes.split(",") and self.batch_size % 2:
            raise ValueError(f"batch_size={self.batch_size} must be even: axes=ranks gives half of it to each rank")
        if self.picture and not os.path.isdir(folder := os.path.dirname(self.picture) or "."):
            raise ValueError(f"picture={self.picture}: the folder {folder} does not exist; create it")


def run_growth(c):
    """Prints a table for each axis, what fits, and the JSON object of exponents; draws the picture."""
    c, base, axes, result, found = detected(c), chosen_work(Work(), c), c.axes.split(","), {}, {}
    tiny = measure(Work(n_layer=1, n_head=1, n_embd=16, batch_size=2, group_size=2, completion_length=4), c)
    print(f"{base.describe()}\na process with a tiny model takes {tiny['megabytes']:.0f} MB, which fits leave out")
    for axis in (axis for axis in axes if axis in AXES):
        growth = found[axis] = measure_axis(axis, base, c, tiny["megabytes"])
        print("\n" + "\n".join(growth.lines()), flush=True)
        result |= {f"{axis}_time_exponent": growth.exponent("seconds"),
                   f"{axis}_memory_exponent": growth.exponent("megabytes")}
    if found:
        print("\n| fits in | " + " | ".join(f"{size} GB" for size in GIGABYTES) + " |")
        print("|" + "---|" * (1 + len(GIGABYTES)))
        for axis, growth in found.items():
            print(f"| {TITLES[axis]} | " + " | ".join(growth.fits(1024 * size) for size in GIGABYTES) + " |")
    if "ranks" in axes:
        result |= measure_ranks(base, c)
    print(json.dumps(result), flush=True)
    if found and c.picture:
        draw(found, c.picture)


def measure(work, c):
    """Seconds of a step, tokens per second, and the peak memory of the process, which is the step's own."""
    side = Side(our_steps, work, False, {"device": c.device, "dtype": c.dtype})
    records = in_turns({"ours": side}, c.warmup, c.steps)["ours"]
    seconds = median(r["step"] for r in records)
    return {"seconds": seconds, "tokens": work.lengths(0).sum() / seconds, "megabytes": records[-1]["megabytes"]}


def measure_axis(axis, base, c, process_megabytes):
    """The Growth of an axis."""
    growth = Growth(axis, process_megabytes)
    for change in AXES[axis][: c.points]:
        work = dataclasses.replace(base, **change)
        growth.sizes.append(COUNTED[axis](work))
        growth.points.append(measure(work, c))
    return growth


class Growth:
    """Time and memory over the sizes of one axis."""

    def __init__(self, axis, process_megabytes):
        self.axis, self.process = axis, process_megabytes
        self.sizes, self.points = [], []

    def values(self, name):
        """Seconds, or megabytes beyond those of a process with a tiny model."""
        return [p[name] - self.process if name == "megabytes" else p[name] for p in self.points]

    def exponent(self, name):
        """p of value = constant * size^p, over the upper half of the sizes; None where memory does not grow."""
        half = len(self.sizes) // 2
        sizes, values = self.sizes[-half - 1 :], self.values(name)[-half - 1 :]
        if min(values) <= 0:
            return None
        return round(float(np.polyfit(np.log(sizes), np.log(values), 1)[0]), 2)

    def fits(self, megabytes):
        """The largest size whose step fits, in words, and the smallest measured one that does not."""
        for i, (size, p) in enumerate(zip(self.sizes, self.points, strict=True)):
            if p["megabytes"] > megabytes:
                return f"{self.sizes[i - 1]:,}, not {size:,} (measured)" if i else f"less than {size:,} (measured)"
        exponent, last = self.exponent("megabytes"), self.values("megabytes")[-1]
        if exponent is None:
            return f"{self.sizes[-1]:,} (measured), and more"
        exponent = max(1.0, exponent)  # in the end weights and activations grow at least as fast as the size
        times = math.exp(min(math.log((megabytes - self.process) / last) / exponent, math.log(FAR)))
        more = "over " if times >= FAR * 0.999 else ""
        return f"{more}{float(f'{self.sizes[-1] * times:.2g}'):,.0f} (extrapolated)"

    def lines(self):
        """Rows of a markdown table."""
        yield f"| {TITLES[self.axis]} | seconds | tokens per second | peak MB |"
        yield "|---|---|---|---|"
        for size, p in zip(self.sizes, self.points, strict=True):
            yield f"| {size:,} | {p['seconds']:.3g} | {p['tokens']:.0f} | {p['megabytes']:.0f} |"
        yield f"| exponent, upper half | {self.exponent('seconds')} | | {self.exponent('megabytes')} |"


def measure_ranks(base, c):
    """Prints the time of the same step on one rank of one core and on two. Returns entries of the JSON object."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    one = rank_side(base, base.batch_size, 0, 1, port)
    two = [rank_side(base, base.batch_size // 2, rank, 2, port) for rank in range(2)]
    for side in (one, *two):
        side.wait()
    times, megabytes = {"one": [], "two": []}, {}
    for number in range(c.warmup + c.steps):
        for name, sides in (("one", [one]), ("two", two)):
            for side in sides:
                side.begin()
            records = [side.wait() for side in sides]
            times[name] += [max(r["step"] for r in records)] * (number >= c.warmup)
            megabytes[name] = " and ".join(f"{r['megabytes']:.0f} MB" for r in records)
    for side in (one, *two):
        side.close()
    one, two = median(times["one"]), median(times["two"])
    print(f"\nthe same step in float32 on one rank of one core {one:.3g} s, on two {two:.3g} s: {one / two:.2f} times "
          f"faster; peak memory {megabytes['one']} on the one, {megabytes['two']} on the two")
    return {"two_ranks": round(one / two, 2)}


def rank_side(work, batch_size, rank, world, port):
    """A rank of one thread, with its share of the work."""
    return Side(our_steps, work, False, {"device": "cpu", "dtype": "float32", "batch_size": batch_size},
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                OMP_NUM_THREADS="1")


def in_short(number):
    """512 as it is, 1,500 as 1.5k, 2,000,000 as 2M."""
    power = 2 if number >= 1e5 else 1
    return f"{number / 1000**power:.2g}{'kM'[power - 1]}" if number >= 1000 else str(number)


def draw(found, path):
    """Draws seconds in the upper row and memory in the lower one, with a panel for each axis; a row has one scale."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter
    figure, panels = plt.subplots(2, len(found), figsize=(3.5 * len(found), 7), sharey="row", squeeze=False)
    for column, growth in zip(panels.T, found.values(), strict=True):
        for panel, (name, label) in zip(column, LABELS.items(), strict=True):
            heights = [p[name] for p in growth.points]
            linear = [heights[0] * size / growth.sizes[0] for size in growth.sizes]
            panel.loglog(growth.sizes, heights, marker=".", label=label)
            panel.loglog(growth.sizes, linear, ":", color="grey", linewidth=1, label="in proportion")
            panel.set_title(f"exponent {growth.exponent(name)}", fontsize=10)
            panel.set_xticks(growth.sizes, [in_short(size) for size in growth.sizes])
            panel.set_xticks([], minor=True)
            panel.grid(alpha=0.3)
        column[-1].set_xlabel(TITLES[growth.axis])
    for panel, (name, label) in zip(panels[:, 0], LABELS.items(), strict=True):
        panel.set_ylabel(label)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_locator(NullLocator())
        highest = max(p[name] for growth in found.values() for p in growth.points)
        panel.set_ylim(top=2 * highest)
    process = next(iter(found.values())).process
    panels[1, 0].set_ylabel(f"{LABELS['megabytes']}\n(the exponents leave out {process:.0f} MB)")
    panels[0, 0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
