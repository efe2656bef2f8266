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
        metrics, config = Path(folder, METRICS), Path(folder, CONFIG)
        lines = 0
        if metrics.exists():
            with open(metrics, "rb") as f:
                lines = sum(line.endswith(b"\n") for line in f)  # the last one may have been cut short
        if not lines:
            raise FileNotFoundError(f"{metrics} holds no metrics; name the out_dir of a run")
        every = 1 + lines // STEPS
        with open(metrics, "rb") as f:
            self.records = [record_of(line, f"{metrics}, line {i}") for i, line in enumerate(f, 1)
                            if i <= lines and ((lines - i) % every == 0 or b'"eval/' in line)]
        self.name, self.last = name, self.records[-1]["step"]
        self.config = json.loads(config.read_text()) if config.exists() else {}
        self.start = self.end = {}
        for record in each_record(Path(folder, STARTS)):
            if "ended" in record:
                self.end = record
            else:
                self.start, self.end = record, {}
        self.curves, self.samples = {}, {}
        for record in self.records:
            for metric, x in record.items():
                self.curves.setdefault(metric, []).append((record["step"], x))
        self.evaluations = [record for record in self.records if any(name.startswith("eval/") for name in record)]
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
        return {phase.removeprefix("time/"): [
            (part[-1]["step"], sum(record.get(phase) or 0 for record in part) / len(part)) for part in parts]
            for phase in self.curves if phase.startswith("time/")}


def names_of(folders):
    """The shortest ends of the paths of folders that tell them apart: out, or a/out and b/out."""
    paths = [Path(without_home(os.path.abspath(folder))).parts for folder in folders]
    alone = lambda path, n: all(other == path or other[-n:] != path[-n:] for other in paths)
    ends = [next(n for n in range(1, len(path) + 1) if alone(path, n) or n == len(path)) for path in paths]
    return [str(Path(*path[-n:])) for path, n in zip(paths, ends, strict=True)]


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
    parts, value = stretches(points, POINTS // 2), lambda point: -math.inf if point[1] is None else point[1]
    kept = {pick(part, key=value) for part in parts for pick in (min, max)} | set(points[-1:])
    return sorted(kept, key=lambda point: point[0])


def smooth(points):
    """At most MEANS points: the last step of each stretch, and the mean of its finite numbers or None."""
    parts = [(part[-1][0], [y for _, y in part if y is not None]) for part in stretches(points, MEANS)]
    return [(step, sum(ys) / len(ys) if ys else None) for step, ys in parts]
