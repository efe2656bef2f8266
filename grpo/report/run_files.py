"""The files that a run writes into its folder, read to be shown."""

import json
import os
from pathlib import Path

from core.files.json_lines import each_record, record_of
from core.run.names import CONFIG, METRICS, SAMPLES, STARTS
from core.run.start import without_home

STEPS = 1000  # steps that are read at most, so that a long run's report is made as quickly as a short one's
SETS = 50     # evaluations whose samples are kept at most: the first and the latest


class Run:
    """The run in a folder, shown under a name. Raises FileNotFoundError if there is none.

    last:    the last step
    curves:  {metric: [(step, number, or None where it was not finite)]}, of many steps every second, third, ... one
    evaluations: the records with held-out metrics
    samples: {step: records of samples.jsonl}, of SETS steps
    config:  config.json; start: the latest start in starts.jsonl; {} if the run has none
    end:     how that start ended, as starts.jsonl has it; {} if it has not
    """

    def __init__(self, folder, name):
        self.name = name
        records = read_metrics(Path(folder, METRICS))
        self.last = records[-1]["step"]
        self.evaluations = [r for r in records if any(metric.startswith("eval/") for metric in r)]
        self.curves = {}
        for record in records:
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
    """The names of folders, or their paths where two have one name."""
    paths = [os.path.abspath(folder) for folder in folders]
    names = [os.path.basename(without_home(path)) for path in paths]
    if len(set(names)) < len(names):
        names = [without_home(path) for path in paths]
    return names
