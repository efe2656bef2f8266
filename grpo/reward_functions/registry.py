"""The table of rewards. A reward is a function: texts in, one number for each completion out."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reward:
    fn: Callable             # returns one float, or None to skip the completion, for each of N completions
    low: float               # the smallest and the largest value that it can return
    high: float
    slow: bool               # runs in worker processes with a deadline, if there are workers
    whole_group: bool        # compares the completions of a problem: it gets all of them in one call
    check: Callable | None   # check(**fields of one record) raises ValueError if the record cannot be scored


REWARDS: dict[str, Reward] = {}
IN_PROCESS = {"texts", "judge_model"}  # parameters that a worker process cannot be given, and that records do not have


def reward(low=-math.inf, high=math.inf, slow=False, whole_group=False, check=None):
    """Registers a function in REWARDS under its own name and returns it unchanged: @reward, or @reward(low, high, ...).

    The function gets only what its signature names:
      prompts, completions     lists of N texts, without padding and stop token
      a field of the records   a list of N values; **columns takes all fields that have no parameter of their own
      keyword-only parameters  a setting of the config by its name; group_size, the number of completions of a problem;
                               texts, the rollouts' texts with their token ids; judge_model, the run's Judge
    It returns a list or a 1-D tensor. A function that takes texts or judge_model runs in the training process even if
    it is slow. Before the first step, `check` is called with the fields of every record. A reward without `check` that
    is not slow is called on all records with empty completions instead. A ValueError for a record is then seen early.
    Raises ValueError if another function has the name; the same function may be loaded again.
    """
    if callable(low):
        return reward()(low)

    def register(fn):
        taken = REWARDS.get(fn.__name__)
        if taken and (taken.fn.__module__, taken.fn.__qualname__) != (fn.__module__, fn.__qualname__):
            raise ValueError(f"reward {fn.__name__} of {fn.__module__} is already defined in {taken.fn.__module__}: "
                             "give it another name")
        REWARDS[fn.__name__] = Reward(fn, low, high, slow, whole_group, check)
        return fn

    return register


def column(fn, columns, field):
    """The values of a field that the reward `fn` needs. Raises ValueError if a record lacks it."""
    values = columns.get(field)
    if values is None or any(value is None for value in values):
        raise ValueError(f"reward {fn.__name__} needs the field '{field}' in every record")
    return values


def parameters(name):
    """{name: Parameter} of the signature of a registered function."""
    return inspect.signature(REWARDS[name].fn).parameters


def arguments(name, texts, known):
    """What a function's signature names: ({parameter: list of N}, {keyword-only parameter: value}).

    texts: has prompts, completions and columns {field: list of N}, which are read only if the function needs them
    known: {name: value} for keyword-only parameters; it wins over a field of the same name
    Raises ValueError if a parameter without a default is neither.
    """
    wanted = parameters(name)
    settings = {key: known[key] for key, p in wanted.items() if p.kind is p.KEYWORD_ONLY and key in known}
    fields = {key: getattr(texts, key) for key in ("prompts", "completions") if key in wanted}
    columns = texts.columns if set(wanted) - set(settings) - set(fields) else {}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    fields |= {key: x for key, x in columns.items() if (takes_all or key in wanted) and key not in settings}
    for key, p in wanted.items():
        required = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if required and key not in fields and key not in settings:
            raise ValueError(f"reward {name} needs the field '{key}' in every record")
    return fields, settings


def run_reward(name, fields, settings, N):
    """Calls a reward by its name, here or in a worker process. Returns a list of N values."""
    values = REWARDS[name].fn(**fields, **settings)
    if getattr(values, "ndim", 1) != 1:
        raise ValueError(f"reward {name} returned shape {tuple(values.shape)}; return one value for each completion")
    if len(values) != N:
        raise ValueError(f"reward {name} returned {len(values)} values for {N} completions")
    return values.tolist() if hasattr(values, "tolist") else list(values)
