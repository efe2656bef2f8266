"""The table of rewards: a reward is text in, numbers out. Adding one is decorating a function."""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reward:
    fn: Callable       # fn(prompts, completions, **columns) -> one float, or None to skip the sample, per completion
    low: float         # the least and the most it can give
    high: float
    slow: bool         # worth a process pool and a deadline
    whole_group: bool  # looks at all completions of a problem at once, in the order of the problems


REWARDS: dict[str, Reward] = {}


def reward(low=-math.inf, high=math.inf, slow=False, whole_group=False):
    """Enters a function into REWARDS under its own name and leaves it as it is: @reward, or @reward(low, high, ...).

    The function gets prompts and completions (lists of N texts, without padding and stop token), every field of the
    records as a list of N, and its settings as plain values: keyword-only parameters with defaults. **columns takes
    the fields that it does not use.
    Raises ValueError if another function has the name; the same function may be loaded again.
    """
    if callable(low):
        return reward()(low)

    def register(fn):
        taken = REWARDS.get(fn.__name__)
        if taken and (taken.fn.__module__, taken.fn.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(f"reward {fn.__name__} of {fn.__module__} is already defined in {taken.fn.__module__}: "
                             "give it another name")
        REWARDS[fn.__name__] = Reward(fn, low, high, slow, whole_group)
        return fn

    return register


def column(fn, columns, field):
    """The field of every record that the reward `fn` cannot do without. Raises ValueError if one lacks it."""
    values = columns.get(field)
    if values is None or any(value is None for value in values):
        raise ValueError(f"reward {fn.__name__} needs the field '{field}' in every record")
    return values
