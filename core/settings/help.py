"""The text of --help: settings with their defaults and what they are for, read from the page of a class."""

import ast
import inspect
import itertools
import textwrap

from core.settings.setting import settings_of

HELP_WIDTH = 120
START = """
Arguments: config files ending in .py and --key=value (--key alone: True); a later one wins."""
ALL = "--help=all adds the settings that have an effect only with another one."


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
    """[(heading, setting, its comment)] of a class and its bases, read from their source.
    A comment begins behind a setting and ends with the comments right below it; one below an empty line is a heading"""
    page = {}
    for part in reversed(cls.__mro__):
        if part is not object:
            page |= page_of_source(textwrap.dedent(inspect.getsource(part)))
    found = []
    for key in settings_of(cls):
        heading, comment = page.get(key, ("", ""))
        found.append((heading, key, comment))
    return found


def is_comment(line):
    """True for a line that has nothing but a comment."""
    return line.lstrip().startswith("#")


def page_of_source(source):
    """{name with a type: (the heading above it, its comment)} of the source of a class."""
    lines, page, heading = source.splitlines(), {}, ""
    end = 0  # the line behind the last setting with its comment
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        for line in lines[end : node.lineno - 1]:
            if is_comment(line):
                heading = line.strip("# ")
        comments = [lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()]
        end = node.end_lineno
        for line in itertools.takewhile(is_comment, lines[end:]):
            comments.append(line)
            end += 1
        page[node.target.id] = heading, " ".join(comment.strip("# ") for comment in comments).strip()
    return page
