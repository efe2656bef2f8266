"""The text of --help: settings with their defaults and what they are for, read from the page of a class."""

import inspect
import re
import textwrap

HELP_WIDTH = 120
START = """
Arguments: config files ending in .py and --key=value (--key alone: True); a later one wins."""
ALL = "--help=all adds the settings that have an effect only with another one."

HEADING = re.compile(r" {4}# (.+)")
FIELD = re.compile(r" {4}(\w+): [^#]*?(?:  # (.+))?")  # its comment is behind it, or deeper in the lines below it
BELOW = re.compile(r" {8}# (.+)")


def help_lines(cls, every):
    """Yields the lines of --help after the docstring of a script: its settings under their headings; without `every`
    those that belong to another setting are left out."""
    defaults = object.__new__(cls)  # unchecked: a script may have settings that must be given
    switch = {key: how for _, how, keys in defaults.features() for key in keys.split()}
    page = [(heading, key, why) for heading, key, why in page_of(cls) if every or key not in switch]
    starts = {key: f"  --{key}={getattr(cls, key)!r}  " for _, key, _ in page}
    width = max(map(len, starts.values()))
    yield f"{START}\n{ALL}" if switch else START
    above = ""
    for heading, key, why in page:
        if heading != above:
            yield f"\n{heading}"
            above = heading
        if key in switch:
            why += f" (with {switch[key]})"
        start = starts[key].ljust(width)
        yield from textwrap.wrap(why, HELP_WIDTH, initial_indent=start, subsequent_indent=" " * width)


def page_of(cls):
    """[(heading, setting, its comment)] of a class, read from its source."""
    page, heading = [], ""
    for line in inspect.getsource(cls).splitlines():
        if found := HEADING.fullmatch(line):
            heading = found[1]
        elif found := FIELD.fullmatch(line):
            page.append((heading, found[1], found[2] or ""))
        elif found := BELOW.fullmatch(line):
            above, key, comment = page.pop()
            page.append((above, key, f"{comment} {found[1]}".strip()))
        elif page and line.strip():
            break  # the methods begin
    return page
