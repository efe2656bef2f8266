"""Trackers: programs that show the metrics of runs, wandb, tensorboard and trackio. A run goes on without them."""

import dataclasses
import importlib.util
import json
import os
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
    known_by = "id"  # the attribute of a run under which a later process goes on

    def __init__(self, config, step, id):
        self.library = importlib.import_module(self.package)
        self.run = self.library.init(project=config.wandb_project, config=settings_to_send(config),
                                     **self.settings(config, id))
        self.id = getattr(self.run, self.known_by)

    def settings(self, config, id):
        """Arguments of init that trackio does not share."""
        private = {}
        if not config.log_text:
            # By itself wandb also sends the console, which shows samples, the command line, which may hold a system
            # prompt, and the changes in the repository, which may hold prompts.
            private = {"console": "off", "x_disable_meta": True, "disable_git": True}
        settings = self.library.Settings(finish_timeout=FINISH_SECONDS, x_transaction_log_flush_interval=FLUSH_SECONDS,
                                         **private)
        return {"name": config.wandb_run_name, "id": id, "resume": "allow" if id else None, "dir": config.out_dir,
                "settings": settings}

    def log(self, step, metrics):
        self.run.log(metrics, step=step)

    def text(self, step, rows):
        self.run.log({"samples": self.library.Table(columns=list(COLUMNS), data=rows)}, step=step)

    def finish(self):
        self.library.finish()


class Trackio(Wandb):
    """A database on this machine, for `trackio show`; or the Hugging Face Space of TRACKIO_SPACE_ID. Its interface is
    wandb's."""

    package, remedy = "trackio", "check TRACKIO_DIR and TRACKIO_SPACE_ID"
    known_by = "name"

    def __init__(self, config, step, id):
        # trackio raises no error while it logs. It warns, and where a warning is an error it prints one line.
        warnings.filterwarnings("error", module=r"trackio\.utils")
        super().__init__(config, step, id)

    def settings(self, config, id):
        return {"name": id or config.wandb_run_name, "resume": "allow" if id else "never", "embed": False}


class TensorBoard:
    """A file of events in out_dir, for `tensorboard --logdir`."""

    package, remedy, id = "tensorboard", "choose another out_dir", None

    def __init__(self, config, step, id):
        from torch.utils.tensorboard import SummaryWriter
        # a reader forgets what an earlier process wrote of the steps from purge_step on
        self.writer = SummaryWriter(config.out_dir, purge_step=step + 1 if step else None)

    def log(self, step, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def text(self, step, rows):
        lines = []
        for row in rows:
            for name, value in zip(COLUMNS, row, strict=True):
                lines.append(f"    {name:<11} | {json.dumps(value, ensure_ascii=False)}")  # indented: no Markdown
        self.writer.add_text("samples", "\n".join(lines), step)

    def finish(self):
        self.writer.close()


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
    if config.wandb_log:
        names = {"wandb": "wandb_log=True"} | names
    return names


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
