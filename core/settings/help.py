"""The text of --help: settings with their defaults, types and the comments beside them."""

import dataclasses
import inspect
import re
import textwrap
import types
import typing

HELP_WIDTH = 120


def allowed_types(hint):
    """The types of a setting: of int | None, int and None."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def class_comments(cls):
    """{field: (section, reason)} of the fields that the class itself declares.

    A comment on a line of its own starts a section. The comment after a field is its reason; comments further right on
    the next lines continue it.
    """
    comments, section, name = {}, "", None
    for line in inspect.getsource(cls).split("\n"):
        code, _, text = line.partition("# ")
        field = re.match(r"    (\w+): ", code)
        if re.match("    (def|@)", code):  # the fields end
            break
        if field:
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


def help_lines(cls):
    """The lines of --help: for each section its settings with their defaults, types and reasons."""
    comments = field_comments(cls)
    settings = {name: f"--{name}={getattr(cls, name)!r}" for name in comments}
    kinds = {name: inspect.formatannotation(hint) for name, hint in typing.get_type_hints(cls).items()}
    wide, typed = (max(map(len, texts.values())) for texts in (settings, kinds))
    lines = ["Arguments: config files ending in .py and --key=value (--key alone: True); a later one wins."]
    for section in dict.fromkeys(section for section, _ in comments.values()):
        lines += ["", section] if section else [""]
        for name, (its_section, reason) in comments.items():
            if its_section == section:
                start = f"  {settings[name]:<{wide}}  {kinds[name]:<{typed}}  "
                lines += textwrap.wrap(reason, HELP_WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
    return lines
