"""The text of --help: settings with their defaults and reasons."""

import textwrap
from dataclasses import fields

from core.settings.setting import load_class

HELP_WIDTH = 120
START = """
Arguments: config files ending in .py and --key=value (--key alone: True); a later one wins.
--help=all adds the settings of optional features."""


def help_lines(cls, with_rooms):
    """Yields the lines of --help after the docstring of a script: its settings; with its rooms, those of every optional
    feature too."""
    yield START
    yield from lines_of(fields(cls))
    for room, openers in cls.rooms.items() if with_rooms else ():
        yield f"\nWith {openers.replace(' ', ' or ')}:"
        yield from lines_of(fields(load_class(room)))


def lines_of(settings):
    """Yields a line for each setting, or more where its reason is long."""
    starts = [f"  --{f.name}={f.default!r}  " for f in settings]
    width = max(map(len, starts))
    for f, start in zip(settings, starts, strict=True):
        yield from textwrap.wrap(
            f.metadata["why"], HELP_WIDTH, initial_indent=start.ljust(width), subsequent_indent=" " * width)
