"""The text of --help: settings with their defaults, types and the comments beside them."""

import dataclasses
import functools
import inspect
import pathlib
import re
import textwrap
import types
import typing

from core.settings.user_code import ROOT

HELP_WIDTH = 120
SHORT = 40  # settings of a script that --help shows in full


def allowed_types(hint):
    """The types of a setting: of int | None, int and None."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def type_name(hint):
    """The types in words, as in "tuple of str or None"."""
    names = []
    for allowed in allowed_types(hint):
        name = allowed.__name__.replace("NoneType", "None")
        if typing.get_args(allowed):
            name += f" of {typing.get_args(allowed)[0].__name__}"
        names.append(name)
    return " or ".join(names)


def class_comments(cls):
    """{field: (section, reason)} of the fields that the class itself declares.

    A comment on a line of its own starts a section. The comment after a field is its reason; comments further right on
    the next lines continue it.
    """
    comments, section, name = {}, "", None
    for line in textwrap.dedent(inspect.getsource(cls)).split("\n"):
        code, _, text = line.partition("# ")
        field = re.match(r"    (\w+): ", code)
        if re.match("    (def|@)", code):  # the fields end
            break
        if field and field[1] in cls.__annotations__:
            name = field[1]
            comments[name] = section, text
        elif code == "    ":
            section = text
        elif text and name:
            comments[name] = comments[name][0], f"{comments[name][1]} {text.strip()}"
    return comments


def field_comments(cls):
    """{field: (section, reason)}: the class's own sections first; its bases' fields join the section of that name.

    A field that a class declares again is in the class's own section; without a comment it has the base's reason.
    """
    comments = {}
    for base in filter(dataclasses.is_dataclass, cls.__mro__):
        for name, (section, reason) in class_comments(base).items():
            first, own_reason = comments.get(name, (section, ""))
            comments[name] = first, own_reason or reason
    return comments


@functools.cache
def usual_settings():
    """The settings that the shipped configs assign, or that a command in their headers or in README.md has."""
    names = set()
    for path in [*pathlib.Path(ROOT, "config").glob("*.py"), pathlib.Path(ROOT, "README.md")]:
        if path.is_file():
            for assigned, in_command in re.findall(r"^(\w+) = |--(\w+)=", path.read_text(encoding="utf-8"), re.M):
                names.add(assigned or in_command)
    return names


def help_lines(cls, everything=True):
    """The lines of --help: for each section its settings with their defaults, types and reasons.

    everything: also the settings that are not usual (usual_settings)
    """
    hints, fields = typing.get_type_hints(cls), dataclasses.fields(cls)
    comments = field_comments(cls)
    names = [name for name in comments if everything or len(fields) <= SHORT or name in usual_settings()]
    lines = ["Arguments: config files ending in .py and --key=value (--key alone: True); a later one wins."]
    if len(names) < len(fields):
        lines.append(f"These {len(names)} settings are usual; --help=all shows all {len(fields)}.")
    settings = {name: f"--{name}={getattr(cls, name)!r}" for name in names}
    wide = max(map(len, settings.values()))
    typed = max(len(type_name(hints[name])) for name in names)
    for section in dict.fromkeys(comments[name][0] for name in names):
        lines += ["", section] if section else [""]
        for name in names:
            if comments[name][0] == section:
                start = f"  {settings[name]:<{wide}}  {type_name(hints[name]):<{typed}}  "
                lines += textwrap.wrap(comments[name][1], HELP_WIDTH, initial_indent=start,
                                       subsequent_indent=" " * len(start))
    return lines
