"""Sums for the metrics of a step, added up over micro-batches and then over ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.distributed import Distributed
from core.errors import Mistake

Number = Tensor | float  # a 0-d tensor, or a number that the host knows


@dataclass
class Values:
    """The numbers of a step, over its micro-batches and all ranks."""
    metrics: dict = field(default_factory=dict)   # {name: value}
    internal: dict = field(default_factory=dict)  # {name: sum} for other metrics or decisions
    varied: dict = field(default_factory=dict)    # {reward: number of groups in which its values differ}
    skipped: dict = field(default_factory=dict)   # {reward: number of completions that it skipped}

    def add_metric(self, name: str, value: float) -> None:
        """Adds a metric. Raises Mistake if there is one of this name."""
        if name in self.metrics:
            raise taken(name)
        self.metrics[name] = value


class Sums:
    """Collects the metrics of a step. Only `values` waits for the device.

    mean, sum, highest: metrics of training; logged, sampled: means of rewards, and of policies or samplers
    internal, varied, skipped: sums that are not logged as they are
    """

    def __init__(self, entries: Sequence = ()):
        """entries: the entries of earlier Sums"""
        self.entries = dict(entries)  # {(kind, name): (total, count)}

    def mean(self, name: str, total: Number, count: Number) -> None:
        """Adds to a metric that is total / count. A mean of nothing is left out."""
        self._add("mean", name, total, count)

    def sum(self, name: str, total: Number) -> None:
        """Adds to a metric that is a sum."""
        self._add("sum", name, total)

    def highest(self, name: str, value: Tensor) -> None:
        """Adds to a metric that is the highest value of all micro-batches and ranks."""
        self._add("highest", name, value)

    def logged(self, name: str, total: Number, count: Number) -> None:
        """Adds to a mean that a reward logs. It may not have the name of another metric."""
        self._add("logged", name, total, count)

    def sampled(self, name: str, total: Number, count: Number) -> None:
        """Adds to a mean that a policy or a sampler measures. It may not have the name of another metric."""
        self._add("sampled", name, total, count)

    def internal(self, name: str, total: Number) -> None:
        """Adds to a sum for other metrics or decisions, which is not logged itself."""
        self._add("internal", name, total)

    def varied(self, reward: str, groups: Number) -> None:
        """Adds to the number of groups in which the values of a reward differ."""
        self._add("varied", reward, groups)

    def skipped(self, reward: str, completions: Number) -> None:
        """Adds to the number of completions that a reward skipped."""
        self._add("skipped", reward, completions)

    def has_mean(self, name: str) -> bool:
        return ("mean", name) in self.entries

    def copy(self) -> "Sums":
        """Returns a copy of the sums so far, to which other parts can be added."""
        return Sums(self.entries)

    def values(self, dist: Distributed) -> Values:
        """Adds up all ranks, with every name that any rank has. A rank that lacks a name adds nothing to it. Waits for
        the device once."""
        keys = dist.keys_of_all(self.entries)
        sum_keys = [key for key in keys if key[0] != "highest"]
        highest_keys = [key for key in keys if key[0] == "highest"]
        pairs = []
        for key in sum_keys:
            pairs += self.entries.get(key, (0.0, 0.0))
        highest = []
        for key in highest_keys:
            value, _ = self.entries.get(key, (-math.inf, 0.0))
            highest.append(value)
        summed = dist.total(stacked(pairs, dist.device))
        largest = dist.largest(stacked(highest, dist.device))
        numbers = torch.cat((summed, largest)).tolist()

        values = Values()
        for (kind, name), total, count in zip(sum_keys, numbers[::2], numbers[1::2]):
            if kind == "internal":
                values.internal[name] = total
            elif kind == "varied":
                values.varied[name] = total
            elif kind == "skipped":
                values.skipped[name] = total
            elif kind == "sum":
                values.add_metric(name, total)
            elif count > 0:
                values.add_metric(name, total / count)
            elif not math.isfinite(total):  # a mean of nothing is left out, unless its sum makes the step bad
                values.add_metric(name, math.nan)
        for (_, name), value in zip(highest_keys, numbers[len(pairs):], strict=True):
            values.add_metric(name, value)
        return values

    def _add(self, kind, name, total, count=0.0):
        key = kind, name
        if key in self.entries:
            total_before, count_before = self.entries[key]
            if kind == "highest":
                total = torch.maximum(total_before, total)
            else:
                total = total_before + total
            count = count_before + count
        self.entries[key] = total, count


def stacked(numbers: Sequence[Number], device: torch.device) -> Tensor:
    """The numbers as one float32 tensor (n,) on the device. Numbers on the host are sent in one copy."""
    known = [0.0 if torch.is_tensor(x) else x for x in numbers]
    known = torch.tensor(known, dtype=torch.float32).to(device, non_blocking=True)
    parts = list(known)
    for i, x in enumerate(numbers):
        if torch.is_tensor(x):
            parts[i] = x.to(known[i], non_blocking=True)
    if not parts:
        return known
    return torch.stack(parts)


def taken(name: str) -> Mistake:
    """The error for a metric of a reward, a policy or a sampler under the name of another metric."""
    return Mistake(f"log_metric({name!r}, ...), or a metric of a policy: there is another metric of this name; give it "
                   "another")
