"""Metrics: one aligned console line, a record in metrics.jsonl at once, wandb if asked."""

import dataclasses
import json
import math
import os
import sys
import time
import unicodedata

from tqdm import tqdm


def create_logger(config, dist, total_steps, columns):
    """A Logger for rank 0; the other ranks get one that writes nothing.

    config: has out_dir, wandb_log, wandb_project, wandb_run_name; columns: metrics of the console line, in order
    """
    if not dist.is_main:
        return Logger(config.out_dir, total_steps, columns, silent=True)
    os.makedirs(config.out_dir, exist_ok=True)
    logger = Logger(config.out_dir, total_steps, columns)
    if config.wandb_log:
        logger.wandb_run, logger.wandb_errors = start_wandb(config)
    return logger


def start_wandb(config):
    """(a wandb run, the errors that wandb raises)"""
    try:
        import wandb
    except ImportError:
        raise ValueError("wandb_log=True, but wandb is not installed: pip install wandb") from None
    try:
        run = wandb.init(project=config.wandb_project, name=config.wandb_run_name, dir=config.out_dir,
                         config=dataclasses.asdict(config))
    except wandb.Error as error:
        raise ValueError(f"wandb_log=True, but wandb did not start ({error}); run wandb login, set WANDB_MODE=offline "
                         "or wandb_log=False") from None
    return run, (wandb.Error,)


def format_number(value):
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{int(value)}"
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


class Logger:
    """log(step, metrics) writes a record; say(text) prints without breaking the progress bar."""

    HEADER_EVERY = 10  # console lines between two rows of column names

    def __init__(self, out_dir, total_steps, columns, wandb_run=None, silent=False, clock=time.monotonic):
        self.path, self.columns = os.path.join(out_dir, "metrics.jsonl"), columns
        self.wandb_run, self.silent, self.clock = wandb_run, silent, clock
        self.total_steps, self.bar = total_steps, None
        self.ended = [(0, clock())]  # (step, time at its end), from where the estimate begins
        self.lines, self.wandb_errors = 0, ()
        if not silent:
            os.makedirs(out_dir, exist_ok=True)
            self.bar = tqdm(total=total_steps, disable=not sys.stderr.isatty(), dynamic_ncols=True, unit="step",
                            leave=False)

    def start(self, step=0):
        """A run begins or goes on at `step`: the records of later steps will be written again."""
        self.ended = [(step, self.clock())]
        if not self.silent:
            self.bar.update(step)
            keep_records(self.path, step)

    def restart_clock(self):
        """Leaves the time until now out of the estimate."""
        self.ended = [(self.ended[-1][0], self.clock())]

    def tick(self):
        """A step has ended, with its evaluation and its checkpoint, if any."""
        if not self.silent:
            self.ended.append((self.ended[-1][0] + 1, self.clock()))
            self.bar.update(1)

    def say(self, text=""):
        if not self.silent:
            tqdm.write(str(text))
            sys.stdout.flush()

    def eta(self, step):
        """Time left, from the mean time of the later half of the steps so far; '-' while there is only the first.

        The first step is left out, because it loads kernels and fills caches. Evaluations and checkpoints count.
        """
        if step == self.total_steps:
            return "0:00"
        if len(self.ended) < 2:
            return "-"
        since, then = self.ended[max(1, len(self.ended) // 2)]
        left = (self.clock() - then) / max(1, step - since) * (self.total_steps - step)
        return f"{int(left) // 60}:{int(left) % 60:02d}"

    def log(self, step, metrics, show=True):
        """metrics: {name: number}. All go to metrics.jsonl and wandb, those in `columns` to the console as well."""
        if self.silent:
            return
        with open(self.path, "a") as f:
            finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # NaN is no JSON
            f.write(json.dumps({"step": step, **finite}) + "\n")
        if show:
            self._show(step, metrics)
        if self.wandb_run is not None:
            self._dashboard(lambda run: run.log(metrics, step=step))

    def _show(self, step, metrics):
        """One aligned line; every HEADER_EVERY lines a line of column names above it."""
        width = {name: max(len(name), 8) for name in self.columns}
        if self.lines % self.HEADER_EVERY == 0:
            self.say("  ".join([f"{'step':>6}", *(f"{name:>{w}}" for name, w in width.items()), f"{'eta':>6}"]))
        self.lines += 1
        values = (format_number(metrics[name]) if name in metrics else "-" for name in width)
        cells = [f"{value:>{w}}" for value, w in zip(values, width.values(), strict=True)]
        self.say("  ".join([f"{step:>6}", *cells, f"{self.eta(step):>6}"]))

    def _dashboard(self, call):
        """Calls wandb. A failure of wandb must not end a training run."""
        try:
            call(self.wandb_run)
        except (OSError, RuntimeError, ValueError, *self.wandb_errors) as error:
            self.say(f"wandb failed ({error}); metrics go on in {self.path}")
            self.wandb_run = None

    def doing(self, what):
        """Shows beside the progress bar what the run is doing."""
        if not self.silent:
            self.bar.set_postfix_str(what)

    def close(self):
        if self.bar is not None:
            self.bar.close()
        if self.wandb_run is not None:
            self._dashboard(lambda run: run.finish())


def keep_records(path, step):
    """Drops a file's records of steps after `step`, at step 0 all records, and a line that a crash cut short."""
    earlier = [record for record in read_records(path) if step and record["step"] <= step]
    with open(path + ".tmp", "w") as f:
        f.writelines(json.dumps(record) + "\n" for record in earlier)
    os.replace(path + ".tmp", path)


def read_records(path):
    """The records of a metrics.jsonl; a last line that was cut short is left out."""
    if not os.path.exists(path):
        return []
    with open(path) as f:
        lines = f.read().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]  # a line without a newline is unfinished


def highlight(text, filled, color):
    """A text on one line, newlines as arrows, and other control characters, which a terminal would obey, as U+FFFD.
    With `color` the characters where `filled` is true are green."""
    out, on = [], False
    for c, sampled in zip(text, filled, strict=True):
        if color and bool(sampled) != on:
            on = bool(sampled)
            out.append("\033[1;32m" if on else "\033[0m")
        out.append("\u21b5" if c == "\n" else "\ufffd" if unicodedata.category(c) == "Cc" else c)
    return "".join(out) + ("\033[0m" if on else "")
