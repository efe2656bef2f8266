"""The table of rewards. A reward is a function: texts in, one number for each completion out."""

import asyncio
import functools
import inspect
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from core.config import run_config_file
from core.files.records import RAW
from core.settings.user_code import UserCodeError, await_user_code, definition, guarded, one_line, run_user_code
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
      a field of the records   a list of N values; **columns takes all fields that have no parameter of their own
      keyword-only parameters  a setting of the config by its name; group_size, the number of completions of a problem;
                               texts, the rollouts' texts with their token ids; judge_model, the run's Judge;
                               reward_scorer, the run's RewardModel
      trainer_state            the number of the step: trainer_state.global_step of trainer_state.max_steps
      log_metric, log_extra    functions: log_metric(name, value) logs a metric, log_extra(column, N values) adds a
                               column to the samples
    It returns a list or a 1-D tensor. An `async def` function is awaited, at the same time as the run's others. A
    function that takes texts, judge_model or reward_scorer runs in the training process even if it is slow. Before the
    first step, `check` is called with the fields of every record. A reward without `check` that is not slow is called
    on all records with empty completions instead. A ValueError for a record is then seen early.
    Raises ValueError if another function has the name; the same function may be loaded again.
    """
    if callable(low):
        return reward()(low)

    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, (int, float)):
            raise ValueError(f"@reward(low, high) got {one_line(end, 60, repr)}; give the smallest and the largest "
                             "value that the function returns, as numbers")

    def register(fn):
        taken = REWARDS.get(fn.__name__)
        if taken and origin(taken.fn) != origin(fn):
            raise ValueError(f"reward {fn.__name__} of {fn.__module__} is already defined in {origin(taken.fn)[0]}: "
                             "give it another name")
        REWARDS[fn.__name__] = Reward(fn, low, high, slow, whole_group, check)
        return fn

    return register


def origin(fn):
    """(module, name) of where a function was defined; functools.partial and objects that can be called have none."""
    return getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)


def load_reward_file(path):
    """Runs a Python file, whose @reward functions are then in REWARDS; it may import files of its own folder.

    Returns {name: function} of what it can call; None does nothing.
    """
    if path is None:
        return {}
    if not os.path.isfile(path):
        raise FileNotFoundError(f"reward_file={path} does not exist")
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)
    try:
        names = run_config_file(path)
    except UserCodeError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        raise ValueError(f"reward_file={path} cannot be run ({error.__cause__}); pip install what it needs, or put "
                         f"the file that it imports beside it ({error.line})") from None
    finally:
        sys.path.remove(folder)
    return {name: x for name, x in names.items() if callable(x) and not inspect.isclass(x)}


def column(fn, columns, field):
    """The values of a field that the reward `fn` needs. Raises ValueError if a record lacks it."""
    values = columns.get(field)
    if values is None or any(value is None for value in values):
        raise ValueError(f"reward {fn.__name__} needs the field '{field}' in every record")
    return values


def parameters(name):
    """{name: Parameter} of the signature of a registered function."""
    return inspect.signature(REWARDS[name].fn).parameters


def takes_all(name):
    """Whether a registered function has a parameter **columns."""
    return any(p.kind is p.VAR_KEYWORD for p in parameters(name).values())


def gets(name, key):
    """Whether a registered function gets one of OF_THE_RUN."""
    return key in parameters(name) or (REWARDS[name].plain and takes_all(name))


def arguments(name, texts, known):
    """What the signature of a function with @reward names: ({parameter: list of N}, {other parameter: value}).

    texts: has prompts, completions, completion_ids and columns {field: list of N}, read only if the function needs them
    known: {name: value} for keyword-only parameters, and trainer_state; it wins over a field of the same name
    Raises ValueError if a parameter without a default is neither.
    """
    wanted = parameters(name)
    settings = {key: known[key] for key, p in wanted.items()
                if key in known and (p.kind is p.KEYWORD_ONLY or key in OF_THE_RUN)}
    fields = {key: getattr(texts, key) for key in ("prompts", "completions", "completion_ids") if key in wanted}
    if set(wanted) - {*settings, *fields, *OF_THE_RUN}:  # the texts' columns are read only if they are needed
        not_columns = {*OF_PLAIN, *settings, *fields, *OF_THE_RUN}
        for key, x in texts.columns.items():
            if (takes_all(name) or key in wanted) and key not in not_columns:
                fields[key] = x
    check_filled(name, fields | settings)
    return fields, settings


def check_filled(name, given):
    """Raises ValueError if a parameter without a default is not among what is given."""
    for key, p in parameters(name).items():
        required = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if required and key not in given and key not in OF_THE_RUN:
            raise ValueError(f"reward {name} needs the field '{key}' in every record")


def run_reward(name, fields, settings, N):
    """Calls a reward by its name, here or in a worker process. Returns (a list of N values, its Log)."""
    return run_together([Call(name, fields, settings, N)])[0]


def run_together(calls):
    """[(a list of N values, Log)] of several Calls. The functions are called one after another; those that are
    `async def` then run at the same time, on one event loop."""
    logs = {call.name: Log() for call in calls}
    returned = {call.name: start(call, logs[call.name]) for call in calls}
    waiting = {name: x for name, x in returned.items() if inspect.isawaitable(x)}
    if waiting:
        returned |= asyncio.run_coroutine_threadsafe(wait_for(waiting), event_loop()).result()
    return [(checked(call.name, returned[call.name], logs[call.name], call.N), logs[call.name]) for call in calls]


def start(call, log):
    """What the function of a reward returns; of an `async def` function, what is to be awaited."""
    fields = {key: list(x) if isinstance(x, list) else x for key, x in call.fields.items()}  # lists that it may change
    logging = {key: getattr(log, key) for key in ("log_metric", "log_extra") if gets(call.name, key)}
    with naming_reward(call.name):
        return run_user_code(REWARDS[call.name].fn, **fields, **call.settings, **logging)


async def wait_for(waiting):
    """{name of a reward: what it returns} of {name: what is to be awaited}."""
    async def wait_for_one(name, awaitable):
        with naming_reward(name):
            return await await_user_code(REWARDS[name].fn, awaitable)

    # All of them end before an error is raised: the loop goes on, and nothing may be left running in it
    done = await asyncio.gather(*map(wait_for_one, waiting, waiting.values()), return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return dict(zip(waiting, done, strict=True))


@functools.cache
def event_loop():
    """An event loop in a thread of its own, for as long as the process runs: connections that a reward keeps open stay
    usable, and a notebook, whose own loop is running, can train."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


@contextmanager
def naming_reward(name):
    """An error of the user's code within has the name of the reward and the line of the user's file."""
    try:
        yield
    except UserCodeError as error:
        raise ValueError(f"{error.line}: reward {name}: {error.what}") from error


def checked(name, values, log, N):
    """The values of a reward as a list of floats and None; NaN of a plain function becomes None, as in TRL. Raises
    ValueError if it did not return, or log, one for each completion."""
    place, remedy = definition(REWARDS[name].fn), f"return a list of {N} numbers or None"
    if place:
        remedy += f" ({place})"
    with guarded(f"reward {name} returned what cannot be read as numbers", remedy):
        returned = values
        if hasattr(values, "tolist"):
            values = values.tolist()
        is_list = isinstance(values, (list, tuple)) and not any(isinstance(x, (str, bytes, list)) for x in values)
        if not is_list:
            raise ValueError(f"reward {name} returned {one_line(returned, 60, repr)}; {remedy}")
        values = [None if x is None else float(x) for x in values]
    if len(values) != N:
        raise ValueError(f"reward {name} returned {len(values)} values for {N} completions; {remedy}")
    for column, logged in log.columns.items():
        if len(logged) != N:
            raise ValueError(f"reward {name}: log_extra({column!r}, ...) got {len(logged)} values for {N} completions; "
                             f"{remedy}")
    if REWARDS[name].plain:
        values = [None if x is not None and math.isnan(x) else x for x in values]
    return values
