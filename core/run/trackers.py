"""Trackers: programs that show the metrics of runs, wandb, tensorboard and trackio. A run goes on without them."""

import dataclasses
import importlib.util
import json
import math
import os

from core.files.json_lines import read_object
from core.files.whole_files import replacing
from core.run.names import TRACKER_IDS
from core.settings.user_code import one_line

COLUMNS = ("problem", "best_score", "best", "worst_score", "worst")  # of the samples that are sent


class Wandb:
    """Weights & Biases: a server; with WANDB_MODE=offline the folder out_dir/wandb, which `wandb sync` sends later."""

    def __init__(self, config, step, id):
        import wandb
        # By itself wandb also sends the console, which shows samples, the command line, which may hold a system prompt,
        # and the changes in the repository, which may hold prompts.
        # It writes its file, which is what a killed run leaves, each second, and waits five minutes for its upload.
        settings = wandb.Settings(finish_timeout=300.0, x_transaction_log_flush_interval=1.0, console="off",
                                  x_disable_meta=True, disable_git=True)
        self.library = wandb
        self.run = wandb.init(project=config.wandb_project, name=config.wandb_run_name, dir=config.absolute_out_dir,
                              id=id, config=settings_to_send(config), resume="allow" if id else None,
                              settings=settings)
        self.id = self.run.id  # under which a later process goes on

    def log(self, step, metrics):
        self.run.log(metrics, step=step)

    def text(self, step, rows):
        self.log(step, {"samples": self.library.Table(columns=list(COLUMNS), data=rows)})

    def finish(self):
        self.library.finish()


class Trackio(Wandb):
    """A database on this machine, for `trackio show`; or the Hugging Face Space of TRACKIO_SPACE_ID. Its interface is
    wandb's."""

    def __init__(self, config, step, id):
        import trackio
        self.library = trackio
        self.run = trackio.init(project=config.wandb_project, name=id or config.wandb_run_name, embed=False,
                                config=settings_to_send(config), resume="allow" if id else "never")
        self.id = self.run.name


class TensorBoard:
    """A file of events in out_dir, for `tensorboard --logdir`."""

    id = None

    def __init__(self, config, step, id):
        from torch.utils.tensorboard import SummaryWriter
        # a reader forgets what an earlier process wrote of the steps from purge_step on
        self.writer = SummaryWriter(config.absolute_out_dir, purge_step=step + 1 if step else None)

    def log(self, step, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def text(self, step, rows):
        lines = []
        for row in rows:
            for name, value in zip(COLUMNS, row, strict=True):
                lines.append(f"    {name:<11} | {json.dumps(value)}")  # indented: no Markdown
        self.writer.add_text("samples", "\n".join(lines), step)

    def finish(self):
        self.writer.close()


TRACKERS = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}  # by the name of the package


def settings_to_send(config):
    """The settings that a tracker shows beside the metrics."""
    settings = dataclasses.asdict(config)
    if not config.log_text:
        del settings["system_prompt"], settings["prompt_format"]
    return settings


def tracker_names(config):
    """The trackers that the config asks for, each once."""
    names = ("wandb", *config.report_to) if config.wandb_log else config.report_to
    return list(dict.fromkeys(names))


def check_trackers(config):
    """Raises ValueError for a tracker that there is not or that is not installed. Imports no tracker."""
    for name in tracker_names(config):
        if name not in TRACKERS:
            raise ValueError(f"report_to: there is no tracker {name!r}; choose among {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"report_to (or wandb_log) asks for {name}, which is not installed: pip install {name}")


class Trackers:
    """The trackers of a run. One that fails is left out from then on, with a line on the console."""

    def __init__(self, config=None, say=print):
        self.config, self.say = config, say
        self.names = tracker_names(config) if config else []
        self.running = {}  # {name: tracker}
        self.known = {}    # {name: the last step that it has from an earlier process}

    def start(self, step, records):
        """Starts the trackers of a new run (step 0) or of one that goes on after `step`.

        records: of metrics.jsonl, with those of later steps, which are the same bit for bit if they are logged again
        Raises ValueError if one does not start and the run is new; a resumed run goes on without it.
        """
        if not self.names:
            return
        path, ids = os.path.join(self.config.absolute_out_dir, TRACKER_IDS), {}
        if step and os.path.exists(path):
            ids = read_object(path, path, "delete it")
        last = max((record["step"] for record in records), default=-1)
        for name in self.names:
            self.known[name] = last if name in ids else -1
            try:
                self.running[name] = TRACKERS[name](self.config, step, ids.get(name))
            except Exception as error:  # of its own kinds
                if not step:
                    raise ValueError(f"{name} did not start ({one_line(error)}); leave it out of report_to") from error
                self.say(f"{name} did not start ({one_line(error)}); the run goes on without it")
        ids |= {name: tracker.id for name, tracker in self.running.items() if tracker.id}
        with replacing(path) as new, open(new, "w") as f:
            json.dump(ids, f)

    def log(self, step, metrics):
        """metrics: {name: number}"""
        self._call(step, "log", step, metrics)

    def text(self, step, samples):
        """Sends samples, [{column: text or number}], if log_text allows it."""
        if self.running and self.config.log_text and samples:
            self._call(step, "text", step, [[cell(sample.get(column)) for column in COLUMNS] for sample in samples])

    def finish(self):
        self._call(math.inf, "finish")
        self.running = {}

    def _call(self, step, method, *arguments):
        """Calls a method of the trackers that do not have this step from an earlier process."""
        for name, tracker in list(self.running.items()):
            if step > self.known[name]:
                try:
                    getattr(tracker, method)(*arguments)
                except Exception as error:  # of its own kinds, or of its connection; none of them may end a run
                    del self.running[name]
                    self.say(f"{name} failed ({one_line(error)}); the run goes on without it")


def cell(value):
    """A number, or a text that can be encoded."""
    return value if value is None or isinstance(value, float) else str(value).encode(errors="replace").decode()
