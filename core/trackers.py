"""Sends metrics to wandb, tensorboard and trackio; a tracker that fails is dropped."""

import dataclasses
import importlib.util

from core.errors import Mistake, described, others


class Wandb:
    """Weights & Biases: a server or, with WANDB_MODE=offline, the folder out_dir/wandb for a later `wandb sync`."""

    def __init__(self, config, settings):
        import wandb
        # By default wandb sends the console, the command line and the git diff, which may show prompts. Metrics are
        # written each second, so that a run that is killed loses no more. finish waits five minutes for the upload
        of_wandb = wandb.Settings(
            console="off",
            x_disable_meta=True,
            disable_git=True,
            x_transaction_log_flush_interval=1.0,
            finish_timeout=300.0)
        self.run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_run_name,
            dir=config.absolute_out_dir,
            config=settings,
            settings=of_wandb)

    def log(self, step, metrics):
        self.run.log(metrics, step=step)

    def finish(self):
        self.run.finish()


class Trackio(Wandb):
    """A database on this machine, for `trackio show`, or the Space of TRACKIO_SPACE_ID. Its interface is wandb's."""

    def __init__(self, config, settings):
        import trackio
        self.run = trackio.init(
            project=config.wandb_project,
            name=config.wandb_run_name,
            config=settings,
            embed=False,
            resume="never")


class TensorBoard:
    """A file of events in out_dir, for `tensorboard --logdir`."""

    def __init__(self, config, settings):
        from torch.utils.tensorboard import SummaryWriter
        self.writer = SummaryWriter(config.absolute_out_dir)

    def log(self, step, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self):
        self.writer.close()


TRACKERS = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}  # by the name of the package


def check_trackers(config):
    """Raises Mistake for an unknown tracker, or one that is not installed. Imports no tracker."""
    for name in config.trackers:
        if name not in TRACKERS:
            raise Mistake(f"report_to: there is no tracker {name!r}; choose among {', '.join(TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise Mistake(f"report_to (or wandb_log) asks for {name}, which is not installed: pip install {name}")


class Trackers:
    """The trackers of a run. One that fails is left out from then on, with a line on the console."""

    def __init__(self, config, say):
        self.config = config
        self.say = say
        self.running = {}   # {name: tracker}

    def start(self):
        """Starts the trackers; a resumed run is a new one for them. Raises Mistake if one does not start."""
        settings = dataclasses.asdict(self.config)
        # The user's texts are not sent
        del settings["system_prompt"]
        del settings["prompt_format"]
        for name in self.config.trackers:
            tracker = TRACKERS[name]
            with others(f"{name} did not start", "leave it out of report_to", ours_too=True):
                self.running[name] = tracker(self.config, settings)

    def log(self, step, metrics):
        """Logs metrics {name: number}."""
        self._call_each(lambda tracker: tracker.log(step, metrics))

    def finish(self):
        self._call_each(lambda tracker: tracker.finish())

    def _call_each(self, call):
        """Calls `call` with each tracker, and drops one that fails."""
        for name, tracker in list(self.running.items()):
            try:
                call(tracker)
            except Exception as error:  # no error in foreign code may end the run
                del self.running[name]
                self.say(f"{name} failed ({described(error)}); the run continues without it")
