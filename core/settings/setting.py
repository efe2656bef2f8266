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

# The type of a setting may name an interval, where a round bracket excludes its end, or the table of its values
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

    A class of settings is a page: its fields in the order of the data flow under headings, which are comments. Rules
    about several settings are in `features` and `conflicts`, in Python.
    origin: {setting: the file or argument that set it}, for errors; None, as from Python: the settings that differ from
        their defaults count as set
    """
    origin: InitVar[dict | None] = field(default=None, kw_only=True)

    def features(self):
        """Yields a row for each optional feature: (is it on, what turns it on, its own settings). Settings of a feature
        that is off must keep their defaults."""
        return ()

    def conflicts(self):
        """Yields a row for each conflict: (is it there, the settings, why and the remedy). The error begins with the
        ones among them that the user set. After a row's only setting `why` continues the sentence, as in
        "minibatches=17 is more than ..."; after several it is a sentence of its own."""
        return ()

    def __post_init__(self, origin):
        if origin is None:
            origin = dict.fromkeys(changed(self, *settings_of(type(self))), "")
        check_values(self, origin)
        for is_on, switch, keys in self.features():
            if is_on:
                continue
            for key in changed(self, *keys.split()):
                if origin.get(key, "").endswith(CONFIG):
                    vars(self)[key] = getattr(type(self), key)  # a resumed run continues without the feature
                else:
                    setting = assignment(self, key, origin)
                    raise Mistake(f"{setting} has an effect only with {switch}; set that, or leave {key} out")
        for is_so, keys, why in self.conflicts():
            if not is_so:
                continue
            keys = keys.split()
            named = [assignment(self, key, origin) for key in keys if key in origin]
            if not named:
                named = [assignment(self, keys[0], origin)]
            colon = ":" if len(keys) > 1 else ""
            raise Mistake(f"{', '.join(named)}{colon} {why}")

    def varied(self, **changes):
        """A copy with other values, which are not checked, because no user sets them."""
        other = copy(self)
        vars(other).update(changes)
        return other


def changed(config, *keys):
    """The settings among `keys` that differ from their defaults."""
    return [key for key in keys if vars(config)[key] != getattr(type(config), key)]


def assignment(config, key, origin):
    """A setting as errors show it: `key=value`, with the file that set it."""
    setting = f"{key}={shown(vars(config)[key])}"
    place = origin.get(key, "")
    if place.endswith((".py", ".json")):
        setting += f" ({place})"
    return setting


@functools.cache
def settings_of(cls):
    """{setting: ({type: its parameters}, what is allowed: an interval, a table or None)} of a class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: kinds_of(hints[f.name]) for f in fields(cls)}


def kinds_of(hint):
    """({type: its parameters}, what is allowed) of the type of a setting. Count | None gives int and NoneType, and
    "[1, 1e6]"."""
    origin = typing.get_origin(hint)
    parts = typing.get_args(hint)
    if origin is Annotated:
        hint, allowed = parts
        kinds, _ = kinds_of(hint)
        return kinds, allowed
    if origin is Literal:
        return {type(value): () for value in parts}, parts
    if origin not in (types.UnionType, typing.Union):
        return {origin or hint: parts}, None
    kinds = {}
    allowed = None
    for part in parts:
        of_part, allowed_in_part = kinds_of(part)
        kinds |= of_part
        allowed = allowed or allowed_in_part
    return kinds, allowed


def check_values(config, origin=None):
    """Raises Mistake for the first setting whose value is not allowed. origin: as of Settings"""
    origin = origin or {}
    for key, (kinds, allowed) in settings_of(type(config)).items():
        value = vars(config)[key]
        if value is None and types.NoneType not in kinds:
            raise Mistake(f"{key}=None must have a value; leave it out for the default")
        check_value(key, value, allowed, origin.get(key, ""))


def check_value(key, value, allowed, place=""):
    """Raises Mistake for a value that is neither None nor allowed: outside an interval, or not in a table.
    place: the file or argument that set it"""
    if value is None or allowed is None:
        return
    if not isinstance(allowed, str):
        fits = value in list(allowed)  # a wrong value may have no hash, which `in` a dict would need
        what = f"one of {', '.join(map(str, allowed))}"
        if place.endswith(CONFIG):
            what += "; name the config file of the run, which may add it"
    elif isinstance(value, str):
        fits = value != ""
        what = allowed
    else:
        fits = is_inside(value, allowed)
        what = f"in {allowed}"
    if not fits:
        from core.settings.other_names import answer_to_value
        error = f"{key}={shown(value)} must be {what}"
        instead = answer_to_value(key, value)
        if instead:
            error += f": {instead}"
        if place:
            error = f"{place}: {error}"
        raise Mistake(error)


def is_inside(value, interval):
    """True if a number lies in an interval. A round bracket excludes its end: "(0, 1]" is above 0 and at most 1.
    "[1, 9] or a share in (0, 1)" is the first interval for a whole number, the second for a float."""
    interval, _, shares = interval.partition(" or a share in ")
    if shares and isinstance(value, float):
        interval = shares
    low, high = map(float, interval[1:-1].split(", "))
    if value == low:
        return interval[0] == "["
    if value == high:
        return interval[-1] == "]"
    return low < value < high


def shown(value):
    """A value as errors show it: its repr, shortened."""
    return one_line(value, 100, repr)


def check_finite(weights, named):
    """Raises Mistake for the first of the weights, pairs (name, tensor), that holds NaN or infinity."""
    for name, tensor in weights:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = tensor.detach().aminmax()  # both are NaN if one number is
        is_finite = math.isfinite(low) and math.isfinite(high)
        if not is_finite:
            raise Mistake(f"{named}: {name} holds numbers that are not finite (NaN or infinity); use a checkpoint "
                          "from before its training failed, or copy it again")
