"""Settings: frozen dataclasses. The type of a field says what is allowed, the comment behind it what it is for."""

import functools
import math
import types
import typing
from copy import copy
from dataclasses import InitVar, dataclass, field, fields
from typing import Annotated, Literal

from core.errors import Mistake, one_line
from core.files import CONFIG

# The type of a setting may name an interval, whose round bracket leaves its end out, or a table that has the value
Count = Annotated[int, "[1, 1e6]"]
Steps = Annotated[int, "[1, 1e12]"]
Natural = Annotated[int, "[0, 1e12]"]
Share = Annotated[float, "(0, 1]"]
Fraction = Annotated[float, "[0, 1)"]
Positive = Annotated[float, "(0, 1e9]"]
NotNegative = Annotated[float, "[0, 1e9]"]
Temperature = Annotated[float, "[1e-6, 1e3]"]
Name = Annotated[str, "a name"]  # of a file, folder, model or function; not an empty text


@dataclass(frozen=True)
class Settings:
    """The base of every config.

    A class of settings is a page: its fields in the order of the data flow under headings, which are comments. What
    depends on several settings is in `features` and `conflicts`, in Python.
    origin: {setting: the file or argument that set it}, for errors; None, from Python: what differs from the defaults
    """
    origin: InitVar[dict | None] = field(default=None, kw_only=True)

    def features(self):
        """Yields (whether it is on, how it is turned on, its own settings) of each optional feature. The settings of a
        feature that is off keep their defaults."""
        return ()

    def conflicts(self):
        """Yields (whether it is so, settings, why and the remedy) of what cannot be. The error names those of the
        settings that the user set. After a single one `why` continues the sentence, as in "minibatches=17 is more than
        ..."; after several it is a sentence of its own."""
        return ()

    def __post_init__(self, origin):
        if origin is None:
            origin = dict.fromkeys(changed(self, *settings_of(type(self))), "")
        check_values(self, origin)
        for is_on, switch, keys in self.features():
            for key in [] if is_on else changed(self, *keys.split()):
                is_of_resumed_run = origin.get(key, "").endswith(CONFIG)
                if is_of_resumed_run:  # which goes on without the feature
                    vars(self)[key] = getattr(type(self), key)
                else:
                    setting = assignment(self, key, origin)
                    raise Mistake(f"{setting} has an effect only with {switch}; set that, or leave {key} out")
        for is_so, keys, why in self.conflicts():
            if is_so:
                keys = keys.split()
                named = [key for key in keys if key in origin] or keys[:1]
                start = ", ".join(assignment(self, key, origin) for key in named)
                raise Mistake(f"{start}: {why}" if len(keys) > 1 else f"{start} {why}")

    def varied(self, **changes):
        """A copy with other values, unchecked: for what no user sets."""
        other = copy(self)
        vars(other).update(changes)
        return other


def changed(config, *keys):
    """The settings among `keys` that differ from their defaults."""
    return [key for key in keys if getattr(config, key) != getattr(type(config), key)]


def assignment(config, key, origin):
    """A setting for an error: `key=value`, with the file that set it."""
    place = origin.get(key, "")
    return f"{key}={shown(getattr(config, key))}" + f" ({place})" * place.endswith((".py", ".json"))


@functools.cache
def settings_of(cls):
    """{setting: ({type: its parameters}, what is allowed: an interval, a table or None)} of a class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: kinds_of(hints[f.name]) for f in fields(cls)}


def kinds_of(hint):
    """({type: its parameters}, what is allowed) of the type of a setting: of Count | None, int and None, "[1, 1e6]"."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return kinds_of(parts[0])[0], parts[1]
    if origin is Literal:
        return dict.fromkeys(map(type, parts), ()), parts
    if origin not in (types.UnionType, typing.Union):
        return {origin or hint: parts}, None
    kinds, allowed = {}, None
    for part in parts:
        more, limits = kinds_of(part)
        kinds |= more
        allowed = limits or allowed
    return kinds, allowed


def check_values(config, origin=None):
    """Raises Mistake for the first setting whose value is not allowed. origin: as of Settings"""
    origin = origin or {}
    for key, (kinds, allowed) in settings_of(type(config)).items():
        value = getattr(config, key)
        if value is None and types.NoneType not in kinds:
            raise Mistake(f"{key}=None must have a value; leave it out for the default")
        check_value(key, value, allowed, origin.get(key, ""))


def check_value(key, value, allowed, place=""):
    """Raises Mistake for a value that is neither None nor allowed: outside an interval, or not in a table.
    place: the file or argument that set it"""
    if value is None or allowed is None:
        return
    if isinstance(value, str) and isinstance(allowed, str):
        fits, what = value, allowed
    elif isinstance(allowed, str):
        fits, what = is_inside(value, allowed), f"in {allowed}"
    else:
        fits, what = value in [*allowed], f"one of {', '.join(map(str, allowed))}"
        if place.endswith(CONFIG):
            what += "; name the config file of the run, which may add it"
    if not fits:
        from core.settings.other_names import answer_to_value
        instead = answer_to_value(key, value)
        error = f"{key}={shown(value)} must be {what}" + f": {instead}" * bool(instead)
        raise Mistake(f"{place}: {error}" if place else error)


def is_inside(value, interval):
    """True if a number lies in an interval; a round bracket leaves its end out: "(0, 1]" is above 0, at most 1.
    "[1, 9] or a share in (0, 1)": a whole number lies in the first interval, another number in the second."""
    interval = interval.split(" or a share in ")[-1 if isinstance(value, float) else 0]
    low, high = map(float, interval[1:-1].split(", "))
    if value in (low, high):
        return interval[0 if value == low else -1] in "[]"
    return low < value < high


def shown(value):
    """A value for an error: its repr, shortened."""
    return one_line(value, 100, repr)


def check_finite(weights, named):
    """Raises Mistake for the first of the weights, pairs (name, tensor), that holds NaN or infinity."""
    for name, tensor in weights:
        if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, tensor.detach().aminmax())):
            raise Mistake(f"{named}: {name} holds numbers that are not finite (NaN or infinity); use a checkpoint "
                          "from before its training failed, or copy it again")
