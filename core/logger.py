"""Metrics on the console, in metrics.jsonl and in trackers; text on a terminal, without control characters."""

import json
import math
import os
import re
import sys
import unicodedata

from tqdm import tqdm

from core.files import CONSOLE, METRICS, keep_records, writing

WIDTH = 100  # columns of the console
HIDDEN = ("Cc", "Cf", "Cs")  # Unicode's categories of control characters, of those without width, of half pairs
GREEN, PLAIN = "\033[1;32m", "\033[0m"
COLORS = re.compile(f"({re.escape(GREEN)}|{re.escape(PLAIN)})")


def create_logger(config, dist, total_steps, columns):
    """A Logger for rank 0; the other ranks get one that writes nothing.
    config: a RunConfig; columns: metrics of the console line, in order"""
    logger = Logger(config.absolute_out_dir, total_steps, columns, silent=not dist.is_main)
    if dist.is_main and config.trackers:
        from core.trackers import Trackers
        logger.trackers = Trackers(config, logger.say)
    return logger


def format_number(value):
    """A number in at most ten characters; "-" for None, which was not measured."""
    if value is None:
        return "-"
    if abs(value) >= 1e9:
        return f"{value:.2g}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


class Logger:
    """log(step, metrics) writes a record; say(text) prints without breaking the progress bar, and to console.log."""

    HEADER_EVERY = 10  # console lines between two rows of column names

    def __init__(self, out_dir, total_steps, columns, silent=False):
        self.path, self.columns = os.path.join(out_dir, METRICS), columns
        self.console = os.path.join(out_dir, CONSOLE)
        self.trackers, self.silent = None, silent
        self.lines = 0
        self.bar = tqdm(total=total_steps, disable=silent or not sys.stderr.isatty(), dynamic_ncols=True, unit="step",
                        leave=False)
        self.doing = self.bar.set_postfix_str  # doing(text) shows beside the bar what the run is doing

    def start(self, step=0):
        """A run begins or resumes at `step`: the records of later steps will be written again."""
        if self.silent:
            return
        self.bar.update(step)
        if self.trackers:
            self.trackers.start()
        keep_records(self.path, step, self.say)

    def tick(self):
        """A step has ended, with its evaluation and its checkpoint, if any."""
        self.bar.update(1)

    def say(self, text: str = "") -> None:
        if not self.silent:
            parts = COLORS.split(str(text))
            parts[::2] = map(visible_lines, parts[::2])  # between the colors
            tqdm.write("".join(parts))
            sys.stdout.flush()
            self.write_console(str(text))

    def write_console(self, text):
        """Adds lines to console.log, without colors."""
        with writing(self.console), open(self.console, "a", encoding="utf-8", errors="replace") as f:
            f.write(visible_lines(COLORS.sub("", text)) + "\n")

    def log(self, step: int, metrics: dict, show: bool = True) -> None:
        """metrics: {name: number}. All go to metrics.jsonl and the trackers, `columns` to the console as well."""
        if self.silent:
            return
        with writing(self.path), open(self.path, "a") as f:
            finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}  # NaN is no JSON
            f.write(json.dumps({"step": step, **finite}) + "\n")
        if self.trackers:
            self.trackers.log(step, metrics)
        if not show:
            return
        names, cells = [f"{'step':>6}"], [f"{step:>6}"]
        for name in self.columns:
            width = max(len(name) + 1, 8)
            names.append(name.rjust(width))
            cells.append(format_number(metrics.get(name)).rjust(width))
        if self.lines % self.HEADER_EVERY == 0:
            self.say(" ".join(names))
        self.lines += 1
        self.say(" ".join(cells))

    def close(self):
        self.bar.close()
        if self.trackers:
            self.trackers.finish()


def visible_lines(text):
    """A text of several lines without what a terminal obeys or does not show."""
    return visible(text, kept="\n\t")


def visible(text, kept=""):
    """A text whose characters that a terminal or browser obeys or does not show are U+FFFD, except those in `kept`."""
    return "".join("\ufffd" if unicodedata.category(c) in HIDDEN and c not in kept else c for c in text)
