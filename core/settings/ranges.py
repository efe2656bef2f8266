"""The values that a setting can have: ranges of numbers, lists of choices, and the error for any other value."""

import math

from core.settings.user_code import one_line


def check_ranges(config, ranges):
    """Raises ValueError for the first setting that is outside its interval, or NaN; None is in no interval and passes.

    ranges: {key: interval, such as "[1, 1e6]"}; a round bracket leaves its end out: "(0, 1]" is above 0, at most 1
    """
    for key, interval in ranges.items():
        value = getattr(config, key)
        if value is not None and not is_inside(value, interval):
            raise ValueError(f"{key}={shown(value)} must be in {interval}")


def check_choices(config, choices):
    """Raises ValueError for the first setting that has none of the values it can have; None passes.

    choices: {key: these values}
    """
    for key, values in choices.items():
        value = getattr(config, key)
        if value is not None and value not in values:
            raise ValueError(f"{key}={shown(value)} is not one of {', '.join(map(str, values))}")


def check_finite(weights, named):
    """Raises ValueError for the first tensor that holds NaN or infinity.

    weights: pairs (name, tensor); named: the setting and the path, for the error
    """
    for name, tensor in weights:
        if tensor.is_floating_point() and tensor.numel() and not all(map(math.isfinite, tensor.detach().aminmax())):
            raise ValueError(f"{named}: {name} holds numbers that are not finite (NaN or infinity); use a checkpoint "
                             "from before its training failed, or copy it again")


def is_inside(value, interval):
    """True if a number lies in an interval."""
    low, high = map(float, interval[1:-1].split(", "))
    if value == low:
        return interval[0] == "["
    if value == high:
        return interval[-1] == "]"
    return low < value < high


def shown(value):
    """A value for an error: its repr, shortened."""
    return one_line(value, 100, repr)
