"""Defines settings as frozen dataclasses. A field's type gives its allowed values, its comment describes it."""

import functools
import math
import types
import typing
from copy import copy
from dataclasses import InitVar, dataclass, field, fields
from typing import Annotated, Literal

from core.errors import Mistake, one_line
from core.files import CONFIG

# The type of a setting may contain an interval, in which a round bracket excludes the end, or a table of values
Count = Annotated[int, "[1, 1e6]"]
Steps = Annotated[int, "[1, 1e12]"]
Natural = Annotated[int, "[0, 1e12]"]
Share = Annotated[float, "(0, 1]"]
Fraction = Annotated[float, "[0, 1)"]
Positive = Annotated[float, "(0, 1e9]"]
NotNegative = Annotated[float, "[0, 1e9]"]
Temperature = Annotated[float, "[1e-6, 1e3]"]
Name = Annotated[str, "a name"]  # of a file, folder, model or function; not empty


@dataclass(frozen=True)
class Settings:
    """The base class of every config.

    A config class reads like a page: its fields are in the order of the data flow, under headings, which are comments.
    `features` and `conflicts` hold the rules about several settings.
    origin: {setting: the file or argument that set it}, for errors; None (a config made in Python): all settings that
        differ from their defaults count as set
    """
    origin: InitVar[dict | None] = field(default=None, kw_only=True)

    def features(self):
        """Yields (is it on, the setting that turns it on, its own settings) for each optional feature. If a feature is
        off, its settings must keep their defaults."""
        return ()

    def conflicts(self):
        """Yields (is there a conflict, the settings, reason and remedy) for each possible conflict. The error begins
        with the settings that the user set. If a row has one setting, the reason continues the sentence, as in
        "minibatches=17 is more than ..."; otherwise it is a separate sentence."""
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
        """Returns a copy with changed values. They are not checked, because they do not come from the user."""
        other = copy(self)
        vars(other).update(changes)
        return other


def changed(config, *keys):
    """Returns the settings in `keys` that differ from their defaults."""
    return [key for key in keys if vars(config)[key] != getattr(type(config), key)]


def assignment(config, key, origin):
    """Formats a setting for errors: `key=value`, with the file that set it."""
    setting = f"{key}={shown(vars(config)[key])}"
    place = origin.get(key, "")
    if place.endswith((".py", ".json")):
        setting += f" ({place})"
    return setting


@functools.cache
def settings_of(cls):
    """Returns {setting: ({type: its parameters}, allowed values: an interval, a table or None)} of a class."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: kinds_of(hints[f.name]) for f in fields(cls)}


def kinds_of(hint):
    """Parses the type of a setting. Returns ({type: its parameters}, allowed values): for Count | None, the types int
    and NoneType, and "[1, 1e6]"."""
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
    """Raises Mistake for the first setting with a forbidden value. origin: as in Settings"""
    origin = origin or {}
    for key, (kinds, allowed) in settings_of(type(config)).items():
        value = vars(config)[key]
        if value is None and types.NoneType not in kinds:
            raise Mistake(f"{key}=None must have a value; leave it out for the default")
        check_value(key, value, allowed, origin.get(key, ""))


def check_value(key, value, allowed, place=""):
    """Raises Mistake for a forbidden value: outside its interval or not in its table. None is allowed here.
    place: the file or argument that set it"""
    if value is None or allowed is None:
        return
    if not isinstance(allowed, str):
        fits = value in list(allowed)  # a list, because a wrong value may be unhashable
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
    """True if a number is in an interval. A round bracket excludes the end: "(0, 1]" means above 0 and at most 1.
    "[1, 9] or a share in (0, 1)" means the first interval for an int and the second for a float."""
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
    """Formats a value for errors: its shortened repr."""
    return one_line(value, 100, repr)


def check_finite(weights, named):
    """Raises Mistake for the first weight that contains NaN or infinity. weights: pairs (name, tensor)"""
    for name, tensor in weights:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = tensor.detach().aminmax()  # both are NaN if any element is
        is_finite = math.isfinite(low) and math.isfinite(high)
        if not is_finite:
            raise Mistake(f"{named}: {name} holds numbers that are not finite (NaN or infinity); use a checkpoint "
                          "from before its training failed, or copy it again")
