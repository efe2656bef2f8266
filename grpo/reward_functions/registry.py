"""The table of rewards. A reward is a function: texts in, one number for each completion out."""

import asyncio
import copy
import inspect
import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from core.config import run_config_file
from core.files.records import RAW
from core.settings.user_code import UserCodeError, definition, event_loop, guarded, naming_line_of
from grpo.reward_functions.reward_log import Log


@dataclass(frozen=True)
class Reward:
    fn: Callable             # returns one float, or None to skip the completion, for each of N completions
    low: float               # the smallest and the largest value that it can return
    high: float
    slow: bool               # runs in worker processes with a deadline, if there are workers
    whole_group: bool        # compares completions of a problem, so that it gets all of a step in one call
    check: Callable | None   # check(**fields of a record) raises ValueError if the record cannot be scored
    plain: bool = False      # a function without @reward: it gets what TRL gives it (grpo/reward_functions/trl.py)

    @property
    def range(self):
        """The smallest and the largest value, in words."""
        return f"[{self.low:g}, {self.high:g}]".replace("[-inf, inf]", "[no range given]")


class Call(NamedTuple):
    name: str        # of a registered function
    fields: dict     # {parameter: list of N}
    settings: dict   # {other parameter: value}
    N: int           # completions


REWARDS: dict[str, Reward] = {}
# Parameters that a worker process cannot be given, and that records do not have
IN_PROCESS = {"texts", "judge_model", "reward_scorer"}
OF_PLAIN = ("prompt", RAW)  # fields only for functions without @reward: the record's own prompt and answer
OF_THE_RUN = ("trainer_state", "log_metric", "log_extra")  # TRL's parameters: they need not be keyword-only


def reward(low=-math.inf, high=math.inf, slow=False, whole_group=False, check=None):
    """Registers a function in REWARDS under its own name and returns it unchanged: @reward, or @reward(low, high, ...).

    The function gets only what its signature names:
      prompts, completions     lists of N texts, without padding and stop token
      completion_ids           a list of N lists of token ids, each completion as sampled, with its stop token
      a field of the records   a list of N values; a parameter with a default also takes a field that records lack, as
                               None; **columns takes all fields that have no parameter of their own
      keyword-only parameters  a setting of the config by its name; group_size, the number of completions of a problem;
                               texts, the rollouts' texts with their token ids; judge_model, the run's Judge;
                               reward_scorer, the run's RewardModel; any other is a setting of the reward's own, with
                               a default, as in def short(completions, *, most=80): reward_settings={"most": 40}
      trainer_state            the number of the step: trainer_state.global_step of trainer_state.max_steps
      log_metric, log_extra    functions: log_metric(name, value) logs a metric, log_extra(column, N values) adds a
                               column to the samples
    It returns a list or a 1-D tensor. An `async def` function is awaited, at the same time as the run's others. A
    function that takes texts, judge_model or reward_scorer runs in the training process even if it is slow. Before the
    first step, `check` is called with the fields of every record. A reward without `check` that is not slow is called
    on all records with empty completions instead. A ValueError for a record is then seen early.
    Raises ValueError if a function of another file has the name; a file may be loaded again.
    """
    if callable(low):
        return reward()(low)
    low, high = float(low), float(high)  # what is no number is refused in the user's line

    def register(fn):
        taken = REWARDS.get(fn.__name__)
        if taken and taken.fn.__module__ != fn.__module__:
            raise ValueError(f"reward {fn.__name__} of {fn.__module__} is already defined in {taken.fn.__module__}: "
                             "give it another name")
        REWARDS[fn.__name__] = Reward(fn, low, high, slow, whole_group, check)
        return fn

    return register


def load_reward_file(path):
    """Runs a Python file, whose @reward functions are then in REWARDS; it may import files of its own folder.

    Returns {name: function or class}; None does nothing.
    """
    if path is None:
        return {}
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    try:
        names = run_config_file(path)
    finally:
        sys.path.remove(folder)
    return {name: x for name, x in names.items() if callable(x)}


def parameters(name):
    """{name: Parameter} of the signature of a registered function."""
    return inspect.signature(REWARDS[name].fn).parameters


def gets(name, key):
    """True if a registered function gets an argument of this name, by a parameter of its own or by **columns. One of
    OF_THE_RUN comes by **columns only to a function without @reward."""
    wanted = parameters(name)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    return key in wanted or (takes_all and (REWARDS[name].plain or key not in OF_THE_RUN))


def arguments(name, texts, known):
    """The arguments that the signature of a function names: ({parameter: list of N}, {other parameter: value}).

    texts: has prompts, completions, completion_ids and columns {field: list of N}
    known: {name: value} for keyword-only parameters, and trainer_state; it wins over a field of the same name
    Raises ValueError if a record lacks what a parameter without a default needs.
    """
    wanted, plain = parameters(name), REWARDS[name].plain
    own = {key for key, p in wanted.items() if p.kind is p.KEYWORD_ONLY}
    settings = {key: x for key, x in known.items() if key in own or (key in OF_THE_RUN and gets(name, key))}
    left_out = {*OF_PLAIN, *OF_THE_RUN, *settings}
    fields = {key: x for key, x in texts.columns.items() if key not in left_out and gets(name, key)}
    for key in ("prompts", "completions", "completion_ids"):
        if key in wanted or (plain and gets(name, key)):
            fields[key] = getattr(texts, key)
    filled = {key for key, x in fields.items() if plain or all(value is not None for value in x)}
    check_filled(name, REWARDS[name].fn, filled | settings.keys())
    return fields, settings


def check_filled(name, function, given):
    """Raises ValueError if a parameter of a function without a default is not among the names given."""
    for key, p in inspect.signature(function).parameters.items():
        optional = p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) or key in OF_THE_RUN
        if key not in given and not optional:
            raise ValueError(f"reward {name} needs the field '{key}' in every record")


def run_reward(*call):
    """Calls a reward, here or in a worker process: the fields of a Call. Returns (a list of N values, its Log)."""
    return run_together([Call(*call)])[call[0]]


def run_together(calls):
    """{name: (a list of N values, Log)} of several Calls. The functions are called one after another; those that are
    `async def` run meanwhile, at the same time."""
    logs = [Log() for _ in calls]
    returned = [start(call, log) for call, log in zip(calls, logs, strict=True)]
    values = [x.result() if isinstance(x, Future) else x for x in returned]
    return {call.name: (checked(call, x, log), log) for call, x, log in zip(calls, values, logs, strict=True)}


def start(call, log):
    """Calls a reward's function. Returns what it returns; for an `async def` function a Future, which the event loop
    fulfils."""
    # Copies that it may change: a value of a record is one object for all completions and steps
    fields = {key: [copy.deepcopy(value) for value in x] for key, x in call.fields.items()}
    logging = {key: getattr(log, key) for key in ("log_metric", "log_extra") if gets(call.name, key)}
    with naming_reward(call.name):
        returned = REWARDS[call.name].fn(**fields, **call.settings, **logging)
    if inspect.iscoroutine(returned):
        return asyncio.run_coroutine_threadsafe(awaited(call.name, returned), event_loop())
    return returned


async def awaited(name, coroutine):
    """The return value of a reward's coroutine. No exit may leave it, since that would end the event loop."""
    with naming_reward(name):
        return await coroutine


@contextmanager
def naming_reward(name):
    """An error of a reward's function within becomes one line with its name and the line of the user's file."""
    try:
        with naming_line_of(REWARDS[name].fn):
            yield
    except UserCodeError as error:
        raise ValueError(f"{error.line}: reward {name}: {error.what}") from error


def checked(call, returned, log):
    """The return value of a reward as a list of N floats: NaN where it skips the completion, infinity where it is not
    a finite number. Raises ValueError if it did not return, or log, one for each completion."""
    name, N = call.name, call.N
    remedy = f"return a list of {N} numbers or None"
    place = definition(REWARDS[name].fn)
    if place:
        remedy += f" ({place})"
    with guarded(f"reward {name} returned something that is no list of numbers", remedy):
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
        values = [value_of(x, REWARDS[name].plain) for x in returned]
    if len(values) != N:
        raise ValueError(f"reward {name} returned {len(values)} values for {N} completions; {remedy}")
    for column, logged in log.columns.items():
        if len(logged) != N:
            raise ValueError(f"reward {name}: log_extra({column!r}, ...) got {len(logged)} values for {N} completions; "
                             f"{remedy}")
    return values


def value_of(x, nan_skips):
    """One value of a reward as a float: NaN for None, which skips the completion, and infinity for what is not finite.
    nan_skips: NaN does too, as in TRL"""
    if x is None or (nan_skips and math.isnan(x)):
        return math.nan
    return float(x) if math.isfinite(x) else math.inf
