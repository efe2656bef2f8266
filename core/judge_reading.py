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
from core.prepacked import packed

AUTO = "auto"              # the fastest of READINGS
PLAIN = "plain"            # the model as it is
LARGEST_DIFFERENCE = 2e-3  # of a text's score from the plain one, in a way of reading that counts as equal
LEAST_CORRELATION = 0.999  # of the ranks of the texts, likewise
COMPILE_FROM = 300         # seconds of plain reading in a run from which compiling saves more than it costs
WORTH_A_CHANGE = 1.05      # times as fast as plain


@dataclass(frozen=True)
class Reading:
    """dtype: of the matrix products in the layers; compiled: by torch.compile, otherwise with packed weights."""
    dtype: torch.dtype
    compiled: bool


READINGS = {PLAIN: None, "packed": Reading(torch.float32, False), "packed_bfloat16": Reading(torch.bfloat16, False),
            "compiled": Reading(torch.float32, True), "compiled_bfloat16": Reading(torch.bfloat16, True)}


class CastingLinear(nn.Linear):
    """A linear layer that computes in the precision of its weights, whatever its input has."""

    def forward(self, x):
        return super().forward(x.to(self.weight.dtype))


def obstacle(judge, name):
    """Why this judge cannot be read in this way on this machine, in words; None if it can."""
    reading = READINGS[name]
    if reading is None:
        return None
    if not isinstance(judge, GPT) or next(judge.parameters()).device.type != "cpu":
        return "it is for judges of this project on a CPU"
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    if reading.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no instructions for bfloat16"
    if reading.compiled and not shutil.which(os.environ.get("CXX", "g++")):
        return "there is no C++ compiler"
    return None


@torch.no_grad()
def prepared(judge, name):
    """A copy of a frozen judge that is read in the way `name` of READINGS; for PLAIN, the judge itself."""
    reading = READINGS[name]
    if reading is None:
        return judge
    fast = copy.deepcopy(judge)
    for layer in fast.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.to(reading.dtype)
            if reading.compiled:
                layer.__class__ = CastingLinear
            else:
                layer.forward = packed(layer, reading.dtype)
    if reading.compiled:
        fast.compile_layers()
    return fast


def choose_reading(judge, scores, share, names=tuple(READINGS)):
    """The fastest of the ways `names` to read a frozen judge, among those that give the scores of the plain one.

    scores: a function of the judge, or of one that `prepared` returns, that gives the scores (N,) of sample texts
    share:  of all texts that the run reads, how many times the sample texts
    Returns (name, a line for the user, or None if there is no choice)
    """
    names = [name for name in names if name != PLAIN and not obstacle(judge, name)]
    if not names:
        return PLAIN, None
    expected, readers, differs, refused = scores(judge), {PLAIN: judge}, {PLAIN: 0.0}, []
    slow = seconds(scores, judge) * share >= COMPILE_FROM

    def add(names):
        for name in names:
            reader = prepared(judge, name)
            difference, correlation = compare(scores(reader), expected)
            if difference < LARGEST_DIFFERENCE and correlation >= LEAST_CORRELATION:
                readers[name], differs[name] = reader, difference
            else:
                refused.append(f"{name} (scores differ by up to {difference:.1g}, rank correlation "
                               f"{correlation:.4f})")

    add(name for name in names if not READINGS[name].compiled)
    ratio = speed(scores, readers)
    if slow:  # compiled only in the precision that is faster, because a compilation takes seconds
        best = READINGS[max(ratio, key=ratio.get)]
        dtype = best.dtype if best else torch.float32
        add(name for name in names if READINGS[name].compiled and READINGS[name].dtype == dtype)
        ratio = speed(scores, readers)
    best = max(ratio, key=ratio.get)
    if ratio[best] < WORTH_A_CHANGE:
        best = PLAIN
    line = "as it is" if best == PLAIN else (f"in {best}, {ratio[best]:.1f} times as fast as plain; "
                                             f"scores differ by at most {differs[best]:.1g}")
    return best, line + "".join(f"; refused: {name}" for name in refused)


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
    """(largest difference, correlation of the ranks) of two tensors (N,). Equal scores correlate perfectly."""
    if torch.equal(scores, expected):
        return 0.0, 1.0
    ranks = [average_ranks(x.double().cpu().numpy()) for x in (scores, expected)]
    with np.errstate(invalid="ignore", divide="ignore"):  # if all scores are equal, it is not a number
        correlation = float(np.corrcoef(*ranks)[0, 1])
    return float((scores - expected).abs().max()), correlation
