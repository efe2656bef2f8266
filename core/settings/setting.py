"""Settings: fields with a default, a reason and a check, in classes whose rooms open when a value asks for them.

A room is an optional feature. Its settings are a class of their own, which is imported and added to a config only while
the room is open. Terms say what opens a room and what excludes what: `key` is true where that setting is on,
`key=word` where it has this value or contains it, `key!=word` where not, `key>other` and `key<other` compare it with a
number or another setting, `key@other` says that the path lies in that folder.
"""

import functools
import importlib
import math
import operator
import os
import re
import sys
import types
import typing
from dataclasses import dataclass, field, fields

from core.errors import Mistake, one_line

TERM = re.compile(r"(\w+)(!?=|[<>@])?(.*)")


def lies_in(path, folder):
    """True if a path is that of something in a folder."""
    return os.path.dirname(os.path.realpath(path)) == os.path.realpath(folder)


READ_AGAIN = "a new run sets aside the files of out_dir, but this one is read again; choose another out_dir"
COMPARE = {">": operator.gt, "<": operator.lt, "@": lies_in}


def setting(default, why, allowed=None):
    """A field. allowed: an interval such as "(0, 1]", a regular expression or choices; why: a reason, for --help."""
    return field(default=default, metadata={"why": why, "allowed": allowed})


def allowed_types(hint):
    """The types of a setting {type: its parameters}: of int | None, int and None."""
    hints = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return {typing.get_origin(t) or t: typing.get_args(t) for t in hints}


def check_values(config):
    """Raises Mistake for the first setting that has a value which it cannot have; None passes."""
    for f in fields(config):
        check_value(f.name, getattr(config, f.name), **f.metadata)


def check_value(key, value, allowed=None, why=""):
    """Raises Mistake for a value that is not None and not allowed, as `setting` has it."""
    if value is None or allowed is None:
        return
    if isinstance(allowed, str):
        fits, what = is_inside(value, allowed), f"in {allowed}"
    elif isinstance(allowed, re.Pattern):
        fits, what = allowed.fullmatch(value), why
    else:
        fits, what = value in allowed, f"one of {', '.join(map(str, allowed))}"
    if not fits:
        from core.settings.other_names import answer_to_value
        instead = answer_to_value(key, value)
        raise Mistake(f"{key}={shown(value)} must be {what}" + f": {instead}" * bool(instead))


def is_inside(value, interval):
    """True if a number lies in an interval; a round bracket leaves its end out: "(0, 1]" is above 0, at most 1.
    "[1, 9] or a share in (0, 1)": a whole number lies in the first interval, another number in the second."""
    interval = interval.split(" or a share in ")[-1 if isinstance(value, float) else 0]
    low, high = map(float, interval[1:-1].split(", "))
    if value in (low, high):
        return interval[0 if value == low else -1] in "[]"
    return low < value < high


def holds(term, get):
    """True if a term holds for the values that `get` returns for a key; nothing is compared with None."""
    key, sign, text = TERM.fullmatch(term).groups()
    value = get(key)
    if sign is None:
        return bool(value)
    if sign in COMPARE:
        other = float(text) if text[0].isdigit() else get(text)
        return None not in (value, other) and COMPARE[sign](value, other)
    found = map(str, value if isinstance(value, tuple) else [value])
    return (text in found) == (sign == "=")


class WithRooms(type):
    """Makes each class of settings a frozen dataclass, whose calls open the rooms that the values ask for."""

    def __init__(cls, name, bases, namespace):
        super().__init__(name, bases, namespace)
        cls._core = namespace.get("_core", cls)  # the class without rooms
        dataclass(frozen=True)(cls)

    def __call__(cls, **values):
        cls, opened = cls._core, []
        known = defaults(cls) | values
        for name, openers in cls.rooms.items():
            if any(holds(opener, known.get) for opener in openers.split()):
                opened.append(load_class(name))
                known = defaults(opened[-1]) | known
        made = with_rooms(cls, *opened)
        for key in [key for key in values if key not in defaults(made)]:
            room, openers = room_of(cls, key)
            if values.pop(key) != getattr(room, key):
                openers = openers.replace(" ", " or ")
                raise Mistake(f"{key}={shown(known[key])} is a setting of {openers}, which is not on")
        return type.__call__(made, **values)


class Settings(metaclass=WithRooms):
    """The base of every config and of every room.

    rooms: {"module:Class": terms, of which each opens it}
    excludes: rows (terms, conditions, why): none of the terms may be true while all of the conditions are
    """

    rooms = {}
    excludes = ()

    def __post_init__(self):
        check_values(self)
        rows = [row for cls in type(self).__mro__ for row in vars(cls).get("excludes", ())]
        for terms, conditions, why in rows:
            if not all(map(self.holds, conditions.split())):
                continue
            for term in filter(self.holds, terms.split()):
                key = TERM.match(term)[1]
                raise Mistake(f"{key}={shown(getattr(self, key))} cannot be with {conditions or term}: {why}")

    def holds(self, term):
        """True if a term holds for the settings and properties of this config."""
        return holds(term, lambda key: getattr(self, key, None))

    def __getattr__(self, key):  # a setting of a room that is not loaded has its default
        if key.startswith("_"):
            raise AttributeError(key)
        return getattr(room_of(self._core, key)[0], key)

    def __reduce__(self):  # the class with the open rooms is made again where it is unpickled
        return functools.partial(self._core, **{f.name: getattr(self, f.name) for f in fields(self)}), ()

    def varied(self, **changes):
        """A copy with other values, unchecked: for what no user sets."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self) | changes)
        return copy


@functools.cache
def with_rooms(cls, *rooms):
    """The class of settings with those of the open rooms. Closed rooms whose file is loaded lend it their defaults."""
    names = {}
    for name in cls.rooms:
        if name.partition(":")[0] in sys.modules and load_class(name) not in rooms:
            names |= defaults(load_class(name))
    names |= {"_core": cls, "__module__": cls.__module__}
    return WithRooms(cls.__name__, (*rooms, cls), names) if cls.rooms else cls


def defaults(cls):
    """{setting: default} of a class."""
    return {f.name: f.default for f in fields(cls)}


def load_class(name):
    """The class of a name, "module:Class", such as that of a room's settings."""
    module, _, cls = name.partition(":")
    return getattr(importlib.import_module(module), cls)


def room_of(cls, key):
    """(class, openers) of the room that has a setting; rooms are imported until it is found. Raises AttributeError."""
    for name, openers in cls.rooms.items():
        if key in defaults(room := load_class(name)):
            return room, openers
    raise AttributeError(key)


def shown(value):
    """A value for an error: its repr, shortened."""
    return one_line(value, 100, repr)


def check_finite(weights, named):
    """Raises Mistake for the first of the weights, pairs (name, tensor), that holds NaN or infinity."""
    for name, tensor in weights:
        if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, tensor.detach().aminmax())):
            raise Mistake(f"{named}: {name} holds numbers that are not finite (NaN or infinity); use a checkpoint "
                          "from before its training failed, or copy it again")
