"""What --help prints: the settings of a dataclass with their defaults, types and the comments beside them."""

import ast
import dataclasses
import inspect
import io
import textwrap
import tokenize
import types
import typing

HELP_WIDTH = 120


def allowed_types(hint):
    """The types of a setting: of int | None, int and None."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def type_name(hint):
    """The types in words."""
    names = [t.__name__.replace("NoneType", "None") + "".join(f" of {x.__name__}" for x in typing.get_args(t)[:1])
             for t in allowed_types(hint)]
    return " or ".join(names)


def class_comments(cls):
    """{field: (section, reason)} of the fields that the class itself declares.

    A comment on a line of its own starts a section. The comment after a field is its reason; comments further right on
    the next lines continue it. Where there is no source to read (a class typed into the interpreter) both are empty.
    """
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return dict.fromkeys(cls.__dict__.get("__annotations__", {}), ("", ""))
    comments = [token for token in tokenize.generate_tokens(io.StringIO(source).readline)
                if token.type == tokenize.COMMENT]
    alone = {token.start[0]: token for token in comments if token.line.lstrip().startswith("#")}
    text = {token.start[0]: token.string.lstrip("# ") for token in comments}
    found = {}
    for node in (node for node in ast.parse(source).body[0].body if isinstance(node, ast.AnnAssign)):
        headings = [line for line, token in alone.items() if token.start[1] == node.col_offset and line < node.lineno]
        end = node.end_lineno + 1
        while end in alone and alone[end].start[1] > node.col_offset:
            end += 1
        reason = " ".join(text.get(line, "") for line in range(node.end_lineno, end))
        found[node.target.id] = (text[headings[-1]] if headings else ""), reason
    return found


def field_comments(cls):
    """{field: (section, reason)}: the class's own sections first; its bases' fields join the section of that name.

    A field that a class declares again is in the class's own section; without a comment it has the base's reason.
    """
    found = {}
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base):
            for name, (section, reason) in class_comments(base).items():
                first, own_reason = found.get(name, (section, ""))
                found[name] = first, own_reason or reason
    return found


def default_of(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def help_lines(cls):
    """What --help prints: for each section its keys with their defaults, types and reasons."""
    hints, fields = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    comments = {name: about for name, about in field_comments(cls).items() if name in fields}
    settings = {name: f"--{name}" + ("" if (default := default_of(f)) is dataclasses.MISSING else f"={default!r}")
                for name, f in fields.items()}
    wide, typed = (max(map(len, column), default=0) for column in (settings.values(), map(type_name, hints.values())))
    lines = ["Arguments: config files ending in .py and --key=value (--key alone: True); a later one wins."]
    for section in dict.fromkeys(section for section, _ in comments.values()):
        lines += ["", section] if section else [""]
        for name in (name for name, about in comments.items() if about[0] == section):
            start = f"  {settings[name]:<{wide}}  {type_name(hints[name]):<{typed}}  "
            lines += textwrap.wrap(comments[name][1], HELP_WIDTH, initial_indent=start,
                                   subsequent_indent=" " * len(start)) or [start.rstrip()]
    return lines
