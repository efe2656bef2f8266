"""Metrics on the console, in metrics.jsonl and in trackers; text on a terminal, without control characters."""

import json
import math
import os
import re
import shutil
import sys
import textwrap
import unicodedata

from tqdm import tqdm

from core.files import CONSOLE, METRICS, keep_records, writing

PIPED = 100    # columns where output is no terminal
NARROWEST = 72  # a terminal with fewer columns wraps lines
HIDDEN = ("Cc", "Cf", "Cs")  # Unicode's categories of control characters, invisible ones and half surrogate pairs
ETA_WIDTH = 9  # the last column of the console
GREEN, DIM, PLAIN = "\033[1;32m", "\033[2m", "\033[0m"
COLORS = re.compile(f"({re.escape(GREEN)}|{re.escape(DIM)}|{re.escape(PLAIN)})")


def create_logger(config, dist, total_steps, columns):
    """Creates a Logger that writes only on rank 0.
    config: a RunConfig; columns: metrics of the console line, in order"""
    logger = Logger(config.absolute_out_dir, total_steps, columns, silent=not dist.is_main)
    if dist.is_main and config.trackers:
        from core.trackers import Trackers
        logger.trackers = Trackers(config, logger.say)
    return logger


def console_width():
    """The columns of the terminal."""
    if not sys.stdout.isatty():
        return PIPED
    return max(NARROWEST, shutil.get_terminal_size().columns)


def fitted(line):
    """Wraps a line that is wider than the terminal. In a pipe it stays whole."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(
        line,
        console_width(),
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False)


def format_number(value):
    """Writes a number in at most ten characters. None, a metric that was not measured, becomes "-"."""
    if value is None:
        return "-"
    if abs(value) >= 1e9:
        return f"{value:.2g}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:.0f}"
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:.4f}"
    return f"{value:.1e}"


class Logger:
    """log(step, metrics) writes a record; say(text) prints without breaking the progress bar, and to console.log."""

    HEADER_EVERY = 10  # console lines between two rows of column names

    def __init__(self, out_dir, total_steps, columns, silent=False):
        self.path = os.path.join(out_dir, METRICS)
        self.console = os.path.join(out_dir, CONSOLE)
        self.columns = columns
        self.silent = silent
        self.trackers = None
        self.eta = "-"      # the time that is left, as Run.look_ahead estimates it
        self.seen = set()   # metrics that a line of the console has had
        self.left_out = []  # columns that do not fit
        self.header = ""    # the names of the columns, as printed last
        self.lines = 0      # below them
        hidden = silent or not sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, disable=hidden, dynamic_ncols=True, unit="step", leave=False)
        self.doing = self.bar.set_postfix_str  # doing(text) shows beside the bar what the run is doing

    def start(self, step=0):
        """Begins or resumes a run at `step`, and drops the records of later steps, which it will write again."""
        if self.silent:
            return
        self.bar.update(step)
        if self.trackers:
            self.trackers.start()
        keep_records(self.path, step, self.say)

    def tick(self):
        """Advances the progress bar after a step, with its evaluation and checkpoint, if any."""
        self.bar.update(1)

    def say(self, text: str = "") -> None:
        if self.silent:
            return
        parts = COLORS.split(str(text))  # a text, a color, a text, a color, ...
        parts[::2] = map(visible_lines, parts[::2])
        tqdm.write("".join(parts))
        sys.stdout.flush()
        self.write_console(str(text))

    def write_console(self, text):
        """Adds lines to console.log, without colors."""
        plain = COLORS.sub("", text)
        with writing(self.console), open(self.console, "a", encoding="utf-8", errors="replace") as f:
            f.write(visible_lines(plain) + "\n")

    def log(self, step: int, metrics: dict, show: bool = True) -> None:
        """Logs metrics {name: number}: all to metrics.jsonl and the trackers, `columns` to the console as well."""
        if self.silent:
            return
        record = {"step": step}
        for name, value in metrics.items():
            record[name] = value if math.isfinite(value) else None  # JSON has no NaN
        with writing(self.path), open(self.path, "a") as f:
            f.write(json.dumps(record) + "\n")
        if self.trackers:
            self.trackers.log(step, metrics)
        if show:
            self._show(step, metrics)

    def _show(self, step, metrics):
        """Prints the line of a step, of the columns that have been measured and that fit, and the time that is left.
        Names of columns come every HEADER_EVERY lines, and when they change."""
        self.seen |= metrics.keys()
        names = f"{'step':>6}"
        cells = f"{step:>6}"
        room = console_width() - ETA_WIDTH
        left_out = []
        measured = [name for name in self.columns if name in self.seen]
        for name in measured:
            width = max(len(name), 8) + 1
            if len(names) + width <= room:
                cell = format_number(metrics.get(name))
                names += f" {name:>{width - 1}}"
                cells += f" {cell:>{width - 1}}"
            else:
                left_out.append(name)
        names += f" {'eta':>{ETA_WIDTH - 1}}"
        cells += f" {self.eta:>{ETA_WIDTH - 1}}"
        if left_out not in ([], self.left_out):
            self.say(fitted(f"columns that do not fit, but are in {METRICS}: {', '.join(left_out)}"))
            self.left_out = left_out
        if names != self.header or self.lines == self.HEADER_EVERY:
            self.say(names)
            self.header = names
            self.lines = 0
        self.lines += 1
        self.say(cells)

    def close(self):
        self.bar.close()
        if self.trackers:
            self.trackers.finish()


def visible_lines(text):
    """Replaces control and invisible characters by U+FFFD, except newlines and tabs."""
    return visible(text, kept="\n\t")


def visible(text, kept=""):
    """Replaces control and invisible characters by U+FFFD, except those in `kept`."""
    characters = []
    for c in text:
        is_hidden = unicodedata.category(c) in HIDDEN and c not in kept
        characters.append("\ufffd" if is_hidden else c)
    return "".join(characters)
