"""The files that a run writes into its folder, read to be shown."""

import json
import os
from pathlib import Path

from core.files.json_lines import each_record
from core.run.names import CONFIG, METRICS, SAMPLES
from core.run.start import without_home

STEPS = 1000  # steps that are read at most, so that a long run's report is made as quickly as a short one's
SETS = 50     # evaluations whose samples are kept at most: the first and the latest


class Run:
    """The run in a folder, shown under a name. Raises FileNotFoundError if there is none.

    last:    the last step
    curves:  {metric: [(step, number, or None where it was not finite)]}, of many steps every second, third, ... one
    evaluations: the records with held-out metrics
    samples: {step: records of samples.jsonl}, of SETS steps
    config:  the settings of config.json; start: the latest start in it; end: how that ended; {} if it has none
    """

    def __init__(self, folder, name):
        self.name = name
        records = read_metrics(Path(folder, METRICS))
        self.last = records[-1]["step"]
        self.evaluations = [record for record in records if is_evaluation(record)]
        self.curves = {}
        for record in records:
            for metric, x in record.items():
                self.curves.setdefault(metric, []).append((record["step"], x))
        config = Path(folder, CONFIG)
        self.config = json.loads(config.read_text()) if config.exists() else {}
        self.start = self.config.pop("starts", [{}])[-1]
        self.end = self.start.pop("end", {})
        self.samples = {}
        for record in each_record(Path(folder, SAMPLES)):
            if record["step"] not in self.samples and len(self.samples) == SETS:
                del self.samples[list(self.samples)[1]]
            self.samples.setdefault(record["step"], []).append(record)


def read_metrics(path):
    """The records of a metrics.jsonl: all evaluations, and of more than STEPS records every second, third, ... one.

    Raises FileNotFoundError if there are none.
    """
    count = sum(1 for _ in each_record(path))
    if not count:
        raise FileNotFoundError(f"{path} holds no metrics; name the out_dir of a run")
    every = 1 + count // STEPS
    return [r for i, r in enumerate(each_record(path), 1) if (count - i) % every == 0 or is_evaluation(r)]


def is_evaluation(record):
    """True if a record has held-out metrics."""
    return any(metric.startswith("eval/") for metric in record)


def names_of(folders):
    """The names of folders, or their paths where two have one name."""
    paths = [os.path.abspath(folder) for folder in folders]
    names = [os.path.basename(without_home(path)) for path in paths]
    if len(set(names)) < len(names):
        names = [without_home(path) for path in paths]
    return names
