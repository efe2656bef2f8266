"""Where numbers go: one aligned console line, metrics.jsonl as it happens, wandb if asked."""

import json
import os
import sys
import time

from tqdm import tqdm


def create_logger(config, dist, total_steps, columns):
    """A Logger for rank 0; the other ranks get one that says nothing.

    config: has out_dir, wandb_log, wandb_project, wandb_run_name; columns: metrics of the console line, in order
    """
    wandb_run = None
    if dist.is_main and config.wandb_log:
        try:
            import wandb
        except ImportError:
            raise ValueError("wandb_log=True, but wandb is not installed: pip install wandb") from None
        from dataclasses import asdict
        wandb_run = wandb.init(project=config.wandb_project, name=config.wandb_run_name, dir=config.out_dir,
                               config=asdict(config))
    return Logger(config.out_dir, total_steps, columns, wandb_run, silent=not dist.is_main)


def format_number(value):
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{int(value)}"
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


class Logger:
    """log(step, metrics) writes a record; say(text) prints without breaking the progress bar."""

    def __init__(self, out_dir, total_steps, columns, wandb_run=None, silent=False):
        self.path, self.columns = os.path.join(out_dir, "metrics.jsonl"), columns
        self.wandb_run, self.silent = wandb_run, silent
        self.total_steps, self.bar, self.started, self.first_step = total_steps, None, time.time(), 0
        if not silent:
            os.makedirs(out_dir, exist_ok=True)
            self.bar = tqdm(total=total_steps, disable=not sys.stderr.isatty(), dynamic_ncols=True, unit="step",
                            leave=False)

    def start(self, step=0):
        """Drops the records of steps that are about to run again, and a line that a crash cut short."""
        self.started, self.first_step = time.time(), step
        if self.silent:
            return
        self.bar.update(step)
        kept = [r for r in read_records(self.path) if r["step"] <= step] if step else []
        with open(self.path + ".tmp", "w") as f:
            f.writelines(json.dumps(record) + "\n" for record in kept)
        os.replace(self.path + ".tmp", self.path)

    def tick(self):
        if not self.silent:
            self.bar.update(1)

    def say(self, text=""):
        if not self.silent:
            tqdm.write(str(text))
            sys.stdout.flush()

    def eta(self, step):
        """Time left, from the mean time per step so far."""
        left = (time.time() - self.started) / max(1, step - self.first_step) * (self.total_steps - step)
        return f"{int(left) // 60}:{int(left) % 60:02d}"

    def log(self, step, metrics, show=True):
        """metrics: {name: number}. Every one goes to metrics.jsonl and wandb, those in `columns` to the console."""
        if self.silent:
            return
        with open(self.path, "a") as f:
            f.write(json.dumps({"step": step, **metrics}) + "\n")
        if show:
            shown = [f"{name} {format_number(metrics[name]):>7}" for name in self.columns if name in metrics]
            self.say(f"step {step:>{len(str(self.total_steps))}} | " + " | ".join(shown) + f" | eta {self.eta(step)}")
        if self.wandb_run is not None:
            try:
                self.wandb_run.log(metrics, step=step)
            except (OSError, RuntimeError, ValueError) as error:  # a lost dashboard must not cost a training run
                self.say(f"wandb failed ({error}); metrics go on in {self.path}")
                self.wandb_run = None

    def close(self):
        if self.bar is not None:
            self.bar.close()
        if self.wandb_run is not None:
            self.wandb_run.finish()


def read_records(path):
    """The records of a metrics.jsonl; a last line that was cut short is left out."""
    if not os.path.exists(path):
        return []
    with open(path) as f:
        lines = f.read().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]  # what follows the last newline was never finished


def highlight(text, filled, color):
    """A text on one line, newlines as arrows, the characters where `filled` is true coloured if the terminal can."""
    out, on = [], False
    for c, this in zip(text, filled, strict=True):
        if color and bool(this) != on:
            on = bool(this)
            out.append("\033[1;32m" if on else "\033[0m")
        out.append("\u21b5" if c == "\n" else c)
    return "".join(out) + ("\033[0m" if on else "")
