"""Environments: classes that answer what a model writes, so that a completion has several turns.

from grpo.environments import environment

@environment
class Guess:
    def __init__(self, seed): ...      # the same for all completions of a group: they start in the same state
    def reset(self, record): ...       # gets the record; may return the prompt, a text or messages
    def step(self, text): ...          # -> (answer, reward): the answer None ends the episode
    def close(self): ...               # optional
    metrics = ("name",)                # optional: attributes that are (sum, count) at the end, logged as means
"""

import functools
import inspect
import os
from dataclasses import dataclass

from core.settings.ranges import check_ranges
from grpo.reward_functions.registry import load_reward_file

ENVIRONMENTS = {}  # {name: class}
RANGES = {"max_turns": "[1, 1e6]"}


@dataclass(frozen=True)
class EnvironmentConfig:
    """The settings of environments."""

    # environments: docs/environments.md
    environment: str | None = None       # the class that answers each turn of a completion; None: there is one turn
    environment_file: str | None = None  # a Python file of yours with @environment classes
    max_turns: int = 8                   # turns of an episode, at most

    def __post_init__(self):
        check_ranges(self, RANGES)


def environment(cls):
    """Registers a class under its name. Raises ValueError if it lacks a method or the parameter of one."""
    for method, parameter in (("__init__", "seed"), ("reset", "record"), ("step", "text")):
        fn = getattr(cls, method, None)
        try:
            inspect.signature(fn).bind("self", parameter)
        except TypeError as error:
            raise ValueError(f"environment {cls.__name__}: it needs {method}(self, {parameter}): {error}") from None
        if fn is object.__init__ or inspect.iscoroutinefunction(fn):
            raise ValueError(f"environment {cls.__name__}: it needs {method}(self, {parameter}), not async")
    cls.metrics = getattr(cls, "metrics", ())
    names = isinstance(cls.metrics, tuple) and all(isinstance(name, str) for name in cls.metrics)
    if not names or {"turns", "failed"} & set(cls.metrics):
        raise ValueError(f"environment {cls.__name__}: metrics={cls.metrics!r} must be a tuple of names of attributes "
                         "other than 'turns' and 'failed'")
    ENVIRONMENTS[cls.__name__] = cls
    return cls


def find_environment(name, path):
    """The class of this name, in the file at `path` if there is one."""
    known = ENVIRONMENTS if path is None else ENVIRONMENTS | classes_in(path)
    if name not in known:
        raise ValueError(f"environment={name!r} is no @environment class of environment_file={path}; known: "
                         f"{', '.join(known) or 'none'}")
    return known[name]


@functools.cache
def classes_in(path):
    """{name: class} of the environments in a file, which runs once."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"environment_file={path} does not exist; correct the path")
    return {name: x for name, x in load_reward_file(path).items() if ENVIRONMENTS.get(name) is x}
