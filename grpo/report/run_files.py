"""The files that a run writes into its folder, read to be shown."""

import json
import math
import os
from pathlib import Path

from core.files.json_lines import each_record, record_of
from core.run.names import CONFIG, METRICS, SAMPLES, STARTS
from core.run.start import without_home

STEPS = 2000             # steps that are read at most, so that a long run's report is made as quickly as a short one's
POINTS, MEANS = 600, 60  # points of a curve at most, of a smoothed one
SETS = 50                # evaluations whose samples are kept at most: the first and the latest
LEAST_HEIGHT = 1e-6      # of an axis, and as a share of its numbers; what is smaller is rounding
LEAST_SHARE = 1e-3


class Run:
    """The run in a folder, shown under a name. Raises FileNotFoundError if there is none.

    records: of metrics.jsonl: all evaluations, and of more than STEPS steps every second, third, ... one
    last:    the last step
    curves:  {metric: [(step, number, or None where it was not finite)]}
    evaluations: the records with held-out metrics
    samples: {step: records of samples.jsonl}, of SETS steps
    config:  config.json; start: the latest start in starts.jsonl; {} if the run has none
    end:     how that start ended, as starts.jsonl has it; {} if it has not
    """

    def __init__(self, folder, name):
        self.name = name
        self.records = read_metrics(Path(folder, METRICS))
        self.last = self.records[-1]["step"]
        self.evaluations = [r for r in self.records if any(metric.startswith("eval/") for metric in r)]
        self.curves = {}
        for record in self.records:
            for metric, x in record.items():
                self.curves.setdefault(metric, []).append((record["step"], x))
        config = Path(folder, CONFIG)
        self.config = json.loads(config.read_text()) if config.exists() else {}
        self.start, self.end = {}, {}
        for record in each_record(Path(folder, STARTS)):
            if "ended" in record:
                self.end = record
            else:
                self.start, self.end = record, {}
        self.samples = {}
        for record in each_record(Path(folder, SAMPLES)):
            if record["step"] not in self.samples and len(self.samples) == SETS:
                del self.samples[list(self.samples)[1]]
            self.samples.setdefault(record["step"], []).append(record)

    def ends(self, metric):
        """(number in the first evaluation, in the last one); None where it was not measured."""
        if not self.evaluations:
            return None, None
        return self.evaluations[0].get(metric), self.evaluations[-1].get(metric)

    def times(self):
        """{phase: [(step, seconds of a step, mean over the steps since the point before)]}"""
        parts = stretches([record for record in self.records if "time/train" in record], MEANS)
        times = {}
        for metric in self.curves:
            if metric.startswith("time/"):
                times[metric.removeprefix("time/")] = [
                    (part[-1]["step"], sum(record.get(metric) or 0 for record in part) / len(part)) for part in parts]
        return times


def read_metrics(path):
    """The records of a metrics.jsonl: all evaluations, and of more than STEPS steps every second, third, ... one.

    Raises FileNotFoundError if there are none. The last line may have been cut short, and is then left out.
    """
    lines = 0
    if path.exists():
        with open(path, "rb") as f:
            lines = sum(line.endswith(b"\n") for line in f)
    if not lines:
        raise FileNotFoundError(f"{path} holds no metrics; name the out_dir of a run")
    every = 1 + lines // STEPS
    records = []
    with open(path, "rb") as f:
        for i, line in enumerate(f, 1):
            if i <= lines and ((lines - i) % every == 0 or b'"eval/' in line):
                records.append(record_of(line, f"{path}, line {i}"))
    return records


def names_of(folders):
    """The shortest ends of the paths of folders that tell them apart: out, or a/out and b/out."""
    paths = [Path(without_home(os.path.abspath(folder))).parts for folder in folders]
    names = []
    for path in paths:
        others = [other for other in paths if other != path]
        length = 1
        while length < len(path) and any(other[-length:] == path[-length:] for other in others):
            length += 1
        names.append(str(Path(*path[-length:])))
    return names


def widened(low, high):
    """The ends of an axis for numbers from low to high: so far apart that rounding does not fill the height."""
    least = max(LEAST_HEIGHT, LEAST_SHARE * max(abs(low), abs(high)))
    missing = max(0.0, least - (high - low))
    return low - missing / 2, high + missing / 2


def stretches(items, count):
    """A list cut into at most `count` lists of equal length; the first may be shorter."""
    size = max(1, -(-len(items) // count))
    return [items[max(0, end - size) : end] for end in range(len(items), 0, -size)][::-1]


def thin(points):
    """About POINTS points: the last one, and the lowest and the highest of each stretch: a jump of one step stays."""
    def height(point):
        return -math.inf if point[1] is None else point[1]

    kept = set(points[-1:])
    for part in stretches(points, POINTS // 2):
        kept |= {min(part, key=height), max(part, key=height)}
    return sorted(kept, key=lambda point: point[0])


def smooth(points):
    """At most MEANS points: the last step of each stretch, and the mean of its finite numbers or None."""
    means = []
    for part in stretches(points, MEANS):
        finite = [y for _, y in part if y is not None]
        means.append((part[-1][0], sum(finite) / len(finite) if finite else None))
    return means
