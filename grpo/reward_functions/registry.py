"""The table of rewards. A reward is a function: texts in, one number for each completion out."""

import asyncio
import functools
import inspect
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

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
    whole_group: bool        # compares the completions of a problem: it gets all of them in one call
    check: Callable | None   # check(**fields of one record) raises ValueError if the record cannot be scored
    plain: bool = False      # a function without @reward: it gets what TRL gives it (grpo/reward_functions/trl.py)


REWARDS: dict[str, Reward] = {}
# Parameters that a worker process cannot be given, and that records do not have
IN_PROCESS = {"texts", "judge_model", "reward_scorer"}
# A reward that raised an error is called again, to find the completion: only if it did so fast, and for so long
QUICK_SECONDS, SEARCH_SECONDS = 0.1, 2.0
OF_PLAIN = ("prompt", RAW)          # fields for functions without @reward alone: the record's own prompt and answer
OF_THE_RUN = ("trainer_state", "log_metric", "log_extra")  # TRL's; a reward may name them in any place of its signature


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
    return key in parameters(name) or REWARDS[name].plain and takes_all(name)


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
    columns = texts.columns if set(wanted) - set(settings) - set(fields) - set(OF_THE_RUN) else {}
    others = {*OF_PLAIN, *settings, *fields, *OF_THE_RUN}
    fields |= {key: x for key, x in columns.items() if (takes_all(name) or key in wanted) and key not in others}
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
    return run_together([(name, fields, settings, N)])[0]


def run_together(calls):
    """[(a list of N values, Log)] of several calls (name, fields, settings, N). The functions are called one after
    another; those that are `async def` then run at the same time, on one event loop."""
    logs, found = [Log() for _ in calls], []
    try:
        for (name, fields, settings, _), log in zip(calls, logs, strict=True):
            found.append(call(name, fields, settings, log))
        waiting = {calls[i][0]: values for i, values in enumerate(found) if inspect.isawaitable(values)}
        done = wait_for(waiting) if waiting else {}
    except UserCodeError as error:
        name, fields, settings, N = next(c for c in calls if c[0] == error.reward)
        raise ValueError(f"{error.line}: reward {name}, {failing(error, fields, settings, N)}: {error.what}") from error
    found = [done.get(name, values) for (name, _, _, _), values in zip(calls, found, strict=True)]
    return [(checked(name, values, log, N), log)
            for (name, _, _, N), values, log in zip(calls, found, logs, strict=True)]


def call(name, fields, settings, log):
    """What the function of a reward returns, of an `async def` what is to be awaited. A UserCodeError has the reward's
    name, and how long it took."""
    start = time.monotonic()
    fields = {key: list(x) if isinstance(x, list) else x for key, x in fields.items()}  # lists that it may change
    logging = {key: getattr(log, key) for key in ("log_metric", "log_extra") if gets(name, key)}
    try:
        return run_user_code(REWARDS[name].fn, **fields, **settings, **logging)
    except UserCodeError as error:
        error.reward, error.seconds = name, time.monotonic() - start
        raise


def failing(error, fields, settings, N):
    """What a reward raised an error with, in words: a completion with its prompt, or the call as a whole. A function
    that reads neither is described by other fields that it got."""
    alone = 0 if N == 1 else completion_that_fails(error, fields, settings, N)
    keys = [key for key in ("prompts", "completions") if key in fields] or list(fields)[:2]
    values = {key: fields[key][alone or 0] for key in keys}
    shown = ", ".join(f"{key[:-1] if key in ('prompts', 'completions') else key} {short(x)}"
                      for key, x in values.items())
    if alone is not None:
        return shown or "called"
    return f"called with {N} completions" + (f", the first with {shown}" if shown else "")


def completion_that_fails(error, fields, settings, N):
    """The number of the first completion with which a reward alone raises the same error; None if it is not found.

    The function is called again with one completion after the other, unless it compares completions, or was slow to
    fail, or is an `async def`: such a call may cost money.
    """
    row, until = REWARDS[error.reward], time.monotonic() + SEARCH_SECONDS
    if row.whole_group and not row.plain or error.seconds > QUICK_SECONDS or not fields:
        return None
    if not any(fields.get("completions", "?")):  # those of check_records, which finds the record itself
        return None
    for i in range(N):
        if time.monotonic() > until:
            break
        try:
            call(error.reward, {key: x[i : i + 1] for key, x in fields.items()}, settings, Log())
        except UserCodeError as again:
            if (again.line, again.what) == (error.line, error.what):
                return i
    return None


def short(value):
    """A text or a list of messages, shortened to 60 characters."""
    return one_line(value, 60, repr)


def checked(name, values, log, N):
    """The values of a reward as a list of floats and None; NaN of a plain function becomes None, as in TRL. Raises
    ValueError if it did not return, or log, one for each completion."""
    place, remedy = definition(REWARDS[name].fn), f"return a list of {N} numbers or None"
    if place:
        remedy += f" ({place})"
    with guarded(f"reward {name} returned what cannot be read as numbers", remedy):
        if getattr(values, "ndim", 1) != 1:
            raise ValueError(f"reward {name} returned shape {tuple(values.shape)}; {remedy}")
        if not hasattr(values, "__len__") or isinstance(values, (str, bytes, dict, set)):
            raise ValueError(f"reward {name} returned {short(values)}; {remedy}")
        values = values.tolist() if hasattr(values, "tolist") else list(values)
        wrong = [x for x in values if isinstance(x, (str, bytes, list))]
        if wrong:
            raise ValueError(f"reward {name} returned a list with {short(wrong[0])}; {remedy}")
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


def wait_for(waiting):
    """{name of a reward: what it returns} of {name: what is to be awaited}. A UserCodeError has the reward's name."""
    async def together():
        calls = [await_user_code(REWARDS[name].fn, awaitable) for name, awaitable in waiting.items()]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run_coroutine_threadsafe(together(), event_loop()).result()
    for name, result in zip(waiting, found, strict=True):
        if isinstance(result, UserCodeError):
            result.reward, result.seconds = name, math.inf
        if isinstance(result, BaseException):
            raise result
    return dict(zip(waiting, found, strict=True))


@functools.cache
def event_loop():
    """An event loop in a thread of its own, for as long as the process runs: connections that a reward keeps open stay
    usable, and a notebook, whose own loop is running, can train."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
