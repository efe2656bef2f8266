"""Builds the text of --help: settings with their defaults and comments, read from the source of a config class."""

import ast
import inspect
import textwrap

from core.logger import console_width
from core.settings.setting import settings_of

START = """
Arguments: config files ending in .py and --key=value; later ones win. A --key
without a value means True."""
ALL = "--help=all also lists settings that take effect only with another one."


def help_lines(cls, every):
    """Yields the lines of --help after the docstring of a script: its settings under their headings. If `every` is
    False, settings that have an effect only with another setting are omitted."""
    defaults = object.__new__(cls)  # without __post_init__, which may demand settings that have no default
    switches = {}
    for _, switch, keys in defaults.features():
        switches |= dict.fromkeys(keys.split(), switch)
    rows = []
    for heading, key, why in page_of(cls):
        if key in switches:
            if not every:
                continue
            why += f" (with {switches[key]})"
        rows.append((heading, f"  --{key}={getattr(cls, key)!r}  ", why))
    yield START
    if switches:
        yield ALL
    width = max(len(start) for _, start, _ in rows)
    indent = " " * width
    above = ""
    for heading, start, why in rows:
        if heading != above:
            yield f"\n{heading}"
            above = heading
        yield from textwrap.wrap(why, console_width(), initial_indent=start.ljust(width), subsequent_indent=indent)


def page_of(cls):
    """Returns [(heading, setting, its comment)] of a class and its bases, read from their source.
    The comment of a setting starts on its line and continues in the comment lines directly below. A comment after an
    empty line is a heading."""
    page = {}
    for part in reversed(cls.__mro__[:-1]):  # the last one is object
        source = textwrap.dedent(inspect.getsource(part))
        page |= page_of_source(source)
    return [page[key] for key in settings_of(cls)]


def page_of_source(source):
    """Returns {name: (heading, name, comment)} of the fields in the source of a class."""
    lines = [*source.splitlines(), ""]
    page = {}
    heading = ""
    end = 0  # the number of the line after the last setting and its comment
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        for line in lines[end : node.lineno - 1]:
            if is_comment(line):
                heading = line.strip("# ")
        end = node.end_lineno
        comment = lines[end - 1][node.end_col_offset :].strip("# ")
        while is_comment(lines[end]):
            comment += " " + lines[end].strip("# ")
            end += 1
        page[node.target.id] = heading, node.target.id, comment.strip()
    return page


def is_comment(line):
    """True if a line contains only a comment."""
    return line.lstrip().startswith("#")
