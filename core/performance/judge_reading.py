"""Ways to read a frozen judge on a CPU that give the same scores; the fastest on this machine is found by measuring."""

import copy
import os
import shutil
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from core.judge import average_ranks
from core.model import GPT
from core.performance.prepacked import packed
from core.performance.sharding import has_parts

AUTO = "auto"              # the fastest of MEASURED and PLAIN
PLAIN = "plain"            # the model as it is
LARGEST_DIFFERENCE = 2e-3  # of a text's score from the plain one, in a way of reading that counts as equal
LEAST_CORRELATION = 0.999  # of the ranks of the texts, likewise
LEAST_SHARE = 20           # readings of the sample texts in a run from which measuring saves more than it costs
WORTH_A_CHANGE = 1.05      # times as fast as plain


@dataclass(frozen=True)
class WayToRead:
    """dtype: of the matrix products in the layers; compiled: by torch.compile, otherwise with packed weights."""
    dtype: torch.dtype
    compiled: bool


READINGS = {PLAIN: None, "packed": WayToRead(torch.float32, False), "packed_bfloat16": WayToRead(torch.bfloat16, False),
            "compiled": WayToRead(torch.float32, True), "compiled_bfloat16": WayToRead(torch.bfloat16, True)}
MEASURED = ("packed", "packed_bfloat16")  # compiling takes longer than a run of minutes gains by it


class CastingLinear(nn.Linear):
    """A linear layer that computes in the precision of its weights, whatever its input has."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


def obstacle(judge, name):
    """Why this judge cannot be read in this way on this machine, in words; None if it can."""
    way = READINGS[name]
    if way is None:
        return None
    if not isinstance(judge, GPT) or next(judge.parameters()).device.type != "cpu" or has_parts(judge):
        return "it is for judges of this project on a CPU, whole in each process"
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    if way.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no instructions for bfloat16"
    if way.compiled and not shutil.which(os.environ.get("CXX", "g++")):
        return "there is no C++ compiler"
    return None


@torch.no_grad()
def prepared(judge, name):
    """A copy of a frozen judge that is read in the way `name` of READINGS; for PLAIN, the judge itself."""
    way = READINGS[name]
    if way is None:
        return judge
    fast = copy.deepcopy(judge)
    for layer in fast.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.to(way.dtype)
            if way.compiled:
                layer.__class__ = CastingLinear
            else:
                layer.forward = packed(layer, way.dtype)
    if way.compiled:
        fast.compile_layers()
    return fast


def choose_reading(judge, scores, names=MEASURED):
    """The fastest of PLAIN and the ways `names` to read a frozen judge, among those that give the scores of PLAIN.

    scores: a function of the judge, or of one that `prepared` returns, that gives the scores (N,) of sample texts
    Returns (name, a line for the user)
    """
    expected, readers, differs, refused = scores(judge), {PLAIN: judge}, {}, ""
    for name in names:
        if name == PLAIN or obstacle(judge, name):
            continue
        reader = prepared(judge, name)
        differs[name], correlation = compare(scores(reader), expected)
        if differs[name] < LARGEST_DIFFERENCE and correlation >= LEAST_CORRELATION:
            readers[name] = reader
        else:
            refused += (f"; refused: {name} (scores differ by up to {differs[name]:.1g}, rank correlation "
                        f"{correlation:.4f})")
    if len(readers) == 1:
        return PLAIN, "plainly: no faster way was found" + refused
    ratio = speed(scores, readers)
    best = max(ratio, key=ratio.get)
    if ratio[best] < WORTH_A_CHANGE:
        return PLAIN, "plainly: no faster way was found" + refused
    return best, (f"in {best}, {ratio[best]:.1f} times as fast as plain; scores differ by at most {differs[best]:.1g}"
                  + refused)


def speed(scores, readers):
    """{name: times as fast as PLAIN} of readers, called in turns, because the speed of a machine changes."""
    times = {name: [] for name in readers}
    for _ in range(2):
        for name, reader in readers.items():
            times[name].append(seconds(scores, reader))
    return {name: min(times[PLAIN]) / min(found) for name, found in times.items()}


def seconds(scores, judge):
    start = time.perf_counter()
    scores(judge)
    return time.perf_counter() - start


def compare(scores, expected):
    """(largest difference, correlation of the ranks) of two tensors (N,). The order of fewer than 8 texts, or of texts
    whose scores are as near to each other as is allowed to an equal reading, tells nothing: it counts as equal."""
    difference = float((scores - expected).abs().max())
    if len(expected) < 8 or float(expected.std()) < LARGEST_DIFFERENCE:
        return difference, 1.0
    ranks = [average_ranks(x.cpu().double().numpy()) for x in (scores, expected)]
    with np.errstate(invalid="ignore", divide="ignore"):  # if all scores are equal, it is not a number
        return difference, float(np.corrcoef(*ranks)[0, 1])
