"""Metrics: one aligned console line, a record in metrics.jsonl at once, trackers if asked. Console lines are kept."""

import json
import math
import os
import re
import sys
import time
import unicodedata

from tqdm import tqdm

from core.files.whole_files import replacing, writing
from core.run.names import CONSOLE, METRICS
from core.run.trackers import Trackers


def create_logger(config, dist, total_steps, columns):
    """A Logger for rank 0; the other ranks get one that writes nothing.

    config: a RunConfig; columns: metrics of the console line, in order
    """
    if not dist.is_main:
        return Logger(config.out_dir, total_steps, columns, silent=True)
    os.makedirs(config.out_dir, exist_ok=True)
    logger = Logger(config.out_dir, total_steps, columns)
    logger.trackers = Trackers(config, logger.say)
    return logger


HIDDEN = ("Cc", "Cf", "Cs")  # Unicode's categories of what a terminal or browser obeys (control, direction of writing),
                             # does not show (no width), or cannot be encoded


class Visible(dict):
    """A table for str.translate that replaces the HIDDEN characters, except those that it is made with."""

    def __missing__(self, code):
        character = chr(code)
        self[code] = "\ufffd" if unicodedata.category(character) in HIDDEN else character
        return self[code]


ON_ONE_LINE = Visible({ord("\n"): "\u21b5"})


def format_number(value):
    """A number in at most ten characters; "-" for None, which was not measured."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e9:
        return f"{value:.2g}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{int(value)}"
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def duration(seconds):
    """A time in words of at most six characters: 4:21, 5h03m, 23d04h."""
    minutes, hours = seconds // 60, seconds // 3600
    if not hours:
        return f"{minutes}:{seconds % 60:02d}"
    if hours < 24:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{hours // 24}d{hours % 24:02d}h"


class Logger:
    """log(step, metrics) writes a record; say(text) prints without breaking the progress bar.

    What is said also goes to console.log: from `start` on, before which nothing is written.
    """

    HEADER_EVERY = 10  # console lines between two rows of column names
    MOST_TIMES = 2000  # times of steps that are kept for the estimate, evenly in the run

    def __init__(self, out_dir, total_steps, columns, silent=False, clock=time.monotonic):
        self.path, self.columns = os.path.join(out_dir, METRICS), columns
        self.console, self.unwritten = os.path.join(out_dir, CONSOLE), []  # None: what is said is written at once
        self.trackers, self.silent, self.clock = Trackers(), silent, clock
        self.total_steps, self.bar = total_steps, None
        self._begin_estimate(0)
        self.lines = 0
        if not silent:
            os.makedirs(out_dir, exist_ok=True)
            self.bar = tqdm(total=total_steps, disable=not sys.stderr.isatty(), dynamic_ncols=True, unit="step",
                            leave=False)

    def start(self, step=0):
        """A run begins or goes on at `step`: the records of later steps will be written again."""
        self._begin_estimate(step)
        if not self.silent:
            unwritten, self.unwritten = self.unwritten, None
            if unwritten:
                self.write_console("\n".join(unwritten))
            self.bar.update(step)
            self.trackers.start(step, each_record(self.path))
            keep_records(self.path, step)

    def restart_clock(self):
        """Leaves the time until now out of the estimate."""
        self._begin_estimate(self.done)

    def _begin_estimate(self, step):
        """self.ended: (step, time at its end) of every `every`-th step from this one on."""
        self.ended, self.done, self.every = [(step, self.clock())], step, 1

    def tick(self):
        """A step has ended, with its evaluation and its checkpoint, if any."""
        if not self.silent:
            self.done += 1
            if (self.done - self.ended[0][0]) % self.every == 0:
                self.ended.append((self.done, self.clock()))
            if len(self.ended) > self.MOST_TIMES:  # a long run needs no more memory than a short one
                self.ended, self.every = self.ended[::2], 2 * self.every
            self.bar.update(1)

    def say(self, text=""):
        if not self.silent:
            with writing("the output of the run"):
                tqdm.write(str(text))
                sys.stdout.flush()
            self.write_console(str(text))

    def write_console(self, text):
        """Adds lines to console.log, without colors."""
        if self.unwritten is not None:
            self.unwritten.append(text)
            return
        with writing(self.console), open(self.console, "a", encoding="utf-8", errors="replace") as f:
            f.write(re.sub(r"\033\[[\d;]*m", "", text) + "\n")

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
        return duration(int(left))

    def log(self, step, metrics, show=True):
        """metrics: {name: number}. All go to metrics.jsonl and the trackers, `columns` to the console as well."""
        if self.silent:
            return
        with writing(self.path), open(self.path, "a") as f:
            finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # NaN is no JSON
            f.write(json.dumps({"step": step, **finite}) + "\n")
        if show:
            self._show(step, metrics)
        self.trackers.log(step, metrics)

    def _show(self, step, metrics):
        """One aligned line; every HEADER_EVERY lines a line of column names above it."""
        width = {name: max(len(name), 8) for name in self.columns}
        if self.lines % self.HEADER_EVERY == 0:
            self.say("  ".join([f"{'step':>6}", *(f"{name:>{w}}" for name, w in width.items()), f"{'eta':>6}"]))
        self.lines += 1
        values = (format_number(metrics.get(name)) for name in width)
        cells = [f"{value:>{w}}" for value, w in zip(values, width.values(), strict=True)]
        self.say("  ".join([f"{step:>6}", *cells, f"{self.eta(step):>6}"]))

    def doing(self, what):
        """Shows beside the progress bar what the run is doing."""
        if not self.silent:
            self.bar.set_postfix_str(what)

    def close(self):
        if self.bar is not None:
            self.bar.close()
        self.trackers.finish()


def keep_records(path, step):
    """Drops a file's records of steps after `step`, at step 0 all records, and a line that a crash cut short."""
    with replacing(path) as new, open(new, "w") as f:
        f.writelines(json.dumps(record) + "\n" for record in each_record(path) if step and record["step"] <= step)


def read_records(path):
    """The records of a metrics.jsonl; a last line that was cut short is left out."""
    return list(each_record(path))


def each_record(path):
    """The same, one at a time: the file of a long run may be larger than the memory."""
    if os.path.exists(path):
        with open(path, errors="replace") as f:
            for number, line in enumerate(f, 1):
                if line.endswith("\n") and line != "\n":
                    yield record_of(line, f"{path}, line {number}")


def record_of(line, where):
    """One record. Raises ValueError if the line, which `where` names, is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(f"{where} is damaged; delete the line")
    return record


def highlight(text, filled, color):
    """A text on one line, newlines as arrows, and other HIDDEN characters as U+FFFD. With `color` the characters where
    `filled` is true are green."""
    out, on = [], False
    for c, sampled in zip(text, filled, strict=True):
        if color and bool(sampled) != on:
            on = bool(sampled)
            out.append("\033[1;32m" if on else "\033[0m")
        out.append(c.translate(ON_ONE_LINE))
    return "".join(out) + ("\033[0m" if on else "")
