"""Trackers: programs that show the metrics of runs, wandb, tensorboard and trackio. A run goes on without them."""

import dataclasses
import importlib.util
import json
import os
import time
import warnings

from core.files.whole_files import replacing
from core.run.names import TRACKER_IDS
from core.settings.user_code import one_line

FINISH_SECONDS = 300.0  # the longest that the end of a run waits for wandb to upload
FLUSH_SECONDS = 1.0     # how often wandb writes its file, which is what a killed run leaves
COLUMNS = ("problem", "best_score", "best", "worst_score", "worst")  # of the samples that are sent


class Wandb:
    """Weights & Biases: a server; with WANDB_MODE=offline the folder out_dir/wandb, which `wandb sync` sends later."""

    package, remedy = "wandb", "run wandb login, set WANDB_MODE=offline"

    def __init__(self, config, step, id):
        import wandb
        # By itself wandb also sends the console, which shows samples, the command line, which may hold a system
        # prompt, and the changes in the repository, which may hold prompts.
        no_text = {} if config.log_text else {"console": "off", "x_disable_meta": True, "disable_git": True}
        self.run = wandb.init(project=config.wandb_project, name=config.wandb_run_name, dir=config.out_dir, id=id,
                              resume="allow" if id else None, config=settings_to_send(config),
                              settings=wandb.Settings(finish_timeout=FINISH_SECONDS, **no_text,
                                                      x_transaction_log_flush_interval=FLUSH_SECONDS))
        self.id, self.table = self.run.id, wandb.Table

    def log(self, step, metrics):
        self.run.log(metrics, step=step)

    def text(self, step, rows):
        self.run.log({"samples": self.table(columns=list(COLUMNS), data=rows)}, step=step)

    def finish(self):
        self.run.finish()


class TensorBoard:
    """A file of events in out_dir, for `tensorboard --logdir`. It is written at once, in the thread of the run:
    tensorboardX's SummaryWriter has one of its own, which ends when the disk is full; the run would wait for it."""

    package, remedy, id = "tensorboardX", "choose another out_dir", None

    def __init__(self, config, step, id):
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        self.event, self.summary = Event, summary
        self.file = event_file_writer.EventsWriter(os.path.join(config.out_dir, "events"), f".{step}")
        if step:  # a reader forgets what an earlier process wrote of later steps
            self._write(step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, step, metrics):
        Summary = self.summary.Summary
        self._write(step, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)
                                                 for name, value in metrics.items()]))

    def text(self, step, rows):
        lines = [f"    {name:<11} | {json.dumps(value, ensure_ascii=False)}"  # indented, so that it is no Markdown
                 for row in rows for name, value in zip(COLUMNS, row, strict=True)]
        self._write(step, summary=self.summary.text("samples", "\n".join(lines)))

    def _write(self, step, **content):
        self.file.write_event(self.event(wall_time=time.time(), step=step, **content))
        self.file.flush()

    def finish(self):
        self.file.close()


class Trackio:
    """A database on this machine, for `trackio show`; or the Hugging Face Space of TRACKIO_SPACE_ID."""

    package, remedy = "trackio", "check TRACKIO_DIR and TRACKIO_SPACE_ID"

    def __init__(self, config, step, id):
        import trackio
        # trackio raises no error while it logs. It warns, and where a warning is an error it prints one line.
        warnings.filterwarnings("error", module=r"trackio\.utils")
        self.run = trackio.init(project=config.wandb_project, name=id or config.wandb_run_name, embed=False,
                                resume="allow" if id else "never", config=settings_to_send(config))
        self.id, self.table, self.finish = self.run.name, trackio.Table, trackio.finish

    def log(self, step, metrics):
        self.run.log(metrics, step=step)

    def text(self, step, rows):
        self.run.log({"samples": self.table(columns=list(COLUMNS), data=rows)}, step=step)


TRACKERS = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}


def settings_to_send(config):
    """The settings that a tracker shows beside the metrics."""
    return {key: value for key, value in dataclasses.asdict(config).items()
            if key != "system_prompt" or config.log_text}


def tracker_names(config):
    """{tracker that the config asks for: the setting that does}."""
    names = dict.fromkeys(config.report_to, f"report_to={config.report_to!r}")
    for name, setting in names.items():
        if name not in TRACKERS:
            raise ValueError(f"{setting}: there is no tracker {name!r}; choose among {', '.join(TRACKERS)}")
    return {"wandb": "wandb_log=True"} | names if config.wandb_log else names


def check_trackers(config):
    """Raises ValueError for a tracker that there is not or that is not installed. Imports no tracker."""
    for name, setting in tracker_names(config).items():
        package = TRACKERS[name].package
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{setting} needs the package {package}: pip install {package}")


class Trackers:
    """The trackers of a run. One that fails is left out from then on, with a line on the console."""

    def __init__(self, config=None, say=print):
        self.config, self.say = config, say
        self.names = tracker_names(config) if config else {}
        self.running = {}  # {name: tracker}
        self.logged = {}   # {name: (step, metric) of all that an earlier process has logged and this one repeats}

    def start(self, step, records):
        """Starts the trackers of a new run (step 0) or of one that goes on after `step`.

        records: of metrics.jsonl, with those of later steps
        Raises ValueError if one does not start and the run is new; a resumed run goes on without it.
        """
        ids = read_ids(self.config) if step and self.names else {}
        repeated = {(record["step"], name) for record in records if record["step"] > step for name in record}
        for name, setting in self.names.items():
            self.logged[name] = repeated if name in ids else set()
            if error := failure(self._start, name, step, ids.get(name)):
                if not step:
                    raise ValueError(f"{setting}: {name} did not start ({error}); {TRACKERS[name].remedy} or leave "
                                     f"{name} out")
                self.say(f"{name} did not start ({error}); the run goes on without it")
        ids |= {name: tracker.id for name, tracker in self.running.items() if tracker.id}
        if ids:
            with replacing(os.path.join(self.config.out_dir, TRACKER_IDS)) as new, open(new, "w") as f:
                json.dump(ids, f)

    def _start(self, name, step, id):
        self.running[name] = TRACKERS[name](self.config, step, id)

    def log(self, step, metrics):
        """metrics: {name: number}"""
        for name in list(self.running):
            new = {key: value for key, value in metrics.items() if (step, key) not in self.logged[name]}
            if new:
                self._call(name, "log", step, new)

    def text(self, step, samples):
        """Sends samples, right after the metrics of the evaluation that made them, if log_text allows it.

        samples: [{column: text or number}], with those of COLUMNS that there are
        """
        if not (self.running and self.config.log_text and samples):
            return
        rows = [[cell(sample.get(column)) for column in COLUMNS] for sample in samples]
        for name in list(self.running):
            if not any(s == step and key.startswith("eval/") for s, key in self.logged[name]):
                self._call(name, "text", step, rows)

    def finish(self):
        for name in list(self.running):
            self._call(name, "finish")
        self.running = {}

    def _call(self, name, method, *arguments):
        if error := failure(getattr(self.running[name], method), *arguments):
            del self.running[name]
            self.say(f"{name} failed ({error}); the run goes on without it")


def failure(function, *arguments):
    """Calls a function. Returns in one line what it raised; nothing if it worked. A tracker may raise anything, from
    its own errors to those of its connection, and none of it may end a run."""
    try:
        function(*arguments)
    except Exception as error:
        return one_line(error)
    return ""


def read_ids(config):
    """The ids that an earlier process of the run wrote; none if the file is not there, or damaged."""
    try:
        with open(os.path.join(config.out_dir, TRACKER_IDS)) as f:
            return dict(json.load(f))
    except (OSError, ValueError, TypeError):
        return {}


def cell(value):
    """A number, or a text that can be encoded."""
    return value if value is None or isinstance(value, float) else str(value).encode(errors="replace").decode()
