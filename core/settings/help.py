"""The text of --help: settings with their defaults, types and the comments beside them."""

import ast
import dataclasses
import inspect
import io
import pathlib
import re
import textwrap
import tokenize
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


def default_of(field):
    """The default of a dataclass field; dataclasses.MISSING without one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def class_comments(cls):
    """{field: (section, reason)} of the fields that the class itself declares.

    A comment on a line of its own starts a section. The comment after a field is its reason; comments further right on
    the next lines continue it. Where there is no source to read (a class typed into the interpreter) both are empty.
    """
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return dict.fromkeys(cls.__dict__.get("__annotations__", {}), ("", ""))
    texts, columns = {}, {}  # of the comments, by line; columns: of those alone on their lines
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            texts[line] = token.string.lstrip("# ")
            if token.line.lstrip().startswith("#"):
                columns[line] = column
    comments = {}
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        section = ""
        for line, column in columns.items():
            if column == node.col_offset and line < node.lineno:
                section = texts[line]
        end = node.end_lineno + 1
        while columns.get(end, 0) > node.col_offset:
            end += 1
        reason = " ".join(texts.get(line, "") for line in range(node.end_lineno, end))
        comments[node.target.id] = section, reason
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
    hints, fields = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    comments = {name: about for name, about in field_comments(cls).items() if name in fields}
    lines = ["Arguments: config files ending in .py and --key=value (--key alone: True); a later one wins."]
    if not everything and len(fields) > SHORT:
        usual = usual_settings()
        comments = {name: about for name, about in comments.items() if name in usual}
        lines.append(f"These {len(comments)} settings are usual; --help=all shows all {len(fields)}.")
    settings = {}
    for name in comments:
        default = default_of(fields[name])
        settings[name] = f"--{name}" if default is dataclasses.MISSING else f"--{name}={default!r}"
    wide = max(map(len, settings.values()), default=0)
    typed = max((len(type_name(hints[name])) for name in settings), default=0)
    for section in dict.fromkeys(section for section, _ in comments.values()):
        lines += ["", section] if section else [""]
        for name, (of, reason) in comments.items():
            if of == section:
                start = f"  {settings[name]:<{wide}}  {type_name(hints[name]):<{typed}}  "
                wrapped = textwrap.wrap(reason, HELP_WIDTH, initial_indent=start, subsequent_indent=" " * len(start))
                lines += wrapped or [start.rstrip()]
    return lines
