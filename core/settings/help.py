"""The text of --help: settings with their defaults and reasons."""

import textwrap
from dataclasses import fields

from core.settings.setting import load_class

HELP_WIDTH = 120
START = "Arguments: config files ending in .py and --key=value (--key alone: True); a later one wins."


def help_lines(cls, which=""):
    """The lines of --help: the settings that most runs set; with "all" those of the core and of every room; otherwise
    those of the rooms whose name or opener contains `which`, if there is one."""
    first, own = cls.first.split(), {f.name: f for f in fields(cls)}
    names = ", ".join(room.rpartition(":")[2].removesuffix("Config") for room in cls.rooms)
    wanted = [room for room, openers in cls.rooms.items()
              if which == "all" or which and which.lower() in f"{room} {openers}".lower()]
    if not wanted and which != "all":
        which = ""  # no room is named so
    yield START
    if which in ("", "all"):
        yield from lines_of([own[key] for key in (first if first and not which else own)])
    for room in wanted:
        yield from ("", cls.rooms[room].replace(" ", " or "))
        yield from lines_of(fields(load_class(room)))
    if cls.rooms and not which:
        yield f"\n--help=all shows all; --help=NAME a room's: {names}"


def lines_of(shown):
    """A line for each field, or more where its reason is long."""
    settings = [f"  --{f.name}={f.default!r}  " for f in shown]
    indent = " " * max(map(len, settings))
    for f, text in zip(shown, settings, strict=True):
        start = text.ljust(len(indent))
        yield from textwrap.wrap(f.metadata["why"], HELP_WIDTH, initial_indent=start, subsequent_indent=indent)
