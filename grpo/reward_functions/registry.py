"""The table of rewards: functions that are called as TRL calls them, texts in, a number for each completion out."""

import asyncio
import copy
import functools
import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from core import data
from core.data import FIELDS, OF_CONSUMER
from core.device import keep_torch_defaults
from core.errors import USER_FILES, Mistake, calling, definition, is_own_function, one_line, others
from core.settings.setting import shown
from core.user_files import load_user_file
from grpo.rollout import join


@dataclass(frozen=True)
class Reward:
    """A function of the table, and what `@reward` says of it."""
    fn: Callable                    # returns N floats, or None for a completion that it skips
    low: float = -math.inf          # its smallest and largest value
    high: float = math.inf
    slow: bool = False              # runs in worker processes, if there are any, with a deadline
    check: Callable | None = None   # check(**fields of a record) raises ValueError if the record cannot be scored
    tags: tuple = ()                # that it looks for in completions, which a prompt should name
    messages: bool = True           # gets messages as completions of messages, as in TRL

    @property
    def range(self):
        return f"[{self.low:g}, {self.high:g}]"

    @property
    def parameters(self):
        """{name: Parameter} of the function."""
        return inspect.signature(self.fn).parameters

    @property
    def settings(self):
        """The names of its keyword-only parameters."""
        return {key for key, p in self.parameters.items() if p.kind is p.KEYWORD_ONLY}

    @property
    def fields(self):
        """The parameters that every record must fill."""
        return [key for key, p in self.parameters.items()
                if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty and key not in OF_THE_RUN]

    def gets(self, key):
        """True if it gets an argument of this name, by a parameter of its own or by **columns."""
        return key in self.parameters or any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())


class Call(NamedTuple):
    name: str        # of the reward
    fields: dict     # {parameter: list of N}
    settings: dict   # {other parameter: value}
    N: int           # completions


REWARDS: dict[str, Reward] = {}
WITHOUT_NAME: list[Reward] = []  # objects with __call__, as they are until the file has been run that names them
ENVIRONMENTS = {}  # {name: class}, see grpo/environments.py
OWN_MASKS = dict(data.MASKS)
MODULES = ("judge", "text", "verify_math", "verify_code", "reward_model")  # of our rewards, in this folder
# Names of metrics that the trainer adds to those of a step, and beginnings by which it knows a metric
RESERVED = re.compile("step|lr|kl_beta|tokens_per_second|(eval|time|skipped)/.*")
OF_THE_RUN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
FIELD_OF = {name: own for own, names in FIELDS.items() for name in names}  # {a name in other data sets: ours}
event_loop = functools.cache(asyncio.new_event_loop)  # one, so that connections of async rewards stay usable


def reward(low=-math.inf, high=math.inf, slow=False, check=None, tags=()):
    """Registers a function in REWARDS under its own name and returns it unchanged: @reward, or @reward(low, high, ...).
    An object with __call__, `brief = reward(0, 1)(Brief(40))`, has the name of its variable in a file.

    The function gets what its signature names; **columns takes all the rest except settings:
      prompts, completions     lists of N texts, without padding and stop token; a prompt of messages is a list of them
      completion_ids           a list of N lists of token ids, each completion as sampled, with its stop token
      a field of the records   a list of N values, under any of its names in FIELDS. A parameter without a default needs
                               it in every record, one with a default gets None where a record lacks it
      trainer_state            trainer_state.global_step of trainer_state.max_steps are done
      log_metric               log_metric(name, value) adds a value to the mean of this name, if it is finite
      log_extra                as in TRL, but its columns are not kept
      keyword-only parameters  a setting of the config by its name; group_size; texts, with their token ids;
                               judge_model, reward_scorer; any other is set by reward_settings={"most": 40}
    It returns a list or a 1-D tensor; an `async def` function is awaited. A slow function gets each completion in a
    call of its own, and neither group_size nor texts nor models. Before the first step, `check` is called with the
    fields of every record, and the start says which of the `tags` no prompt names.
    """
    if callable(low):
        return reward()(low)

    def register(fn):
        if isinstance(fn, type):
            raise Mistake(f"{definition(fn)}: @reward is for functions and objects, not for the class "
                          f"{one_line(fn.__name__)}; name an object of it, as in brief = reward(0, 1)(Brief())")
        named = (tags,) if isinstance(tags, str) else tuple(tags)
        new = Reward(fn, float(low), float(high), slow, check, named, messages=False)
        if hasattr(fn, "__name__"):
            add(one_line(fn.__name__), new)
        else:
            WITHOUT_NAME.append(new)
        return fn

    return register


def import_rewards(names=None):
    """Imports our rewards, module after module, until REWARDS has these names; None: all."""
    for module in MODULES:
        if names is None or not REWARDS.keys() >= set(names):
            importlib.import_module(f"grpo.reward_functions.{module}")


def add(name, new):
    """Adds a Reward to the table. Raises Mistake if one of ours has this name."""
    known = REWARDS.get(name, new).fn
    module, of_new = str(known.__module__), str(new.fn.__module__)
    if module != of_new and is_own_function(known):
        raise Mistake(f"reward {name} is one of this project's: give your function another name")
    if not of_new.startswith(f"{module}."):  # a neighbour of the user's file does not replace a reward of the file
        REWARDS[name] = new


def load_reward_file(path):
    """Runs a Python file, once. Of all such files, its rewards, masks and environments alone are then in the tables.
    Returns {name: function or class} of the file; of None, no file, {}."""
    root, names, added = run_reward_file(path)
    for table, new in zip(tables(), added, strict=True):
        for name, x in list(table.items()):
            function = x.fn if isinstance(x, Reward) else x
            module = f"{function.__module__}."
            if module.startswith(USER_FILES) and not module.startswith(f"{root}."):
                del table[name]
        table.update(new)
    for name, mask in OWN_MASKS.items():  # another file may have replaced one
        data.MASKS.setdefault(name, mask)
    return names


@functools.cache
def run_reward_file(path):
    """(name of its module, {name: function or class} of it, [{name: what it adds}] of the tables), of a file."""
    if path is None:
        return "", {}, [{} for _ in tables()]
    if not os.path.isfile(path):
        raise Mistake(f"reward_file={path} does not exist; correct the path")
    import_rewards()  # the file may build on them, and may not take their names
    before = [dict(table) for table in tables()]
    with keep_torch_defaults():
        module = load_user_file(path)
    neighbours = [x for name, x in sys.modules.items() if name.startswith(f"{module.__name__}.")]
    for of_file in [*neighbours, module]:  # of two objects of one name that of the file counts
        for name, x in vars(of_file).items():
            for new in WITHOUT_NAME:
                if new.fn is x:
                    add(name, new)
    added = []
    for table, old in zip(tables(), before, strict=True):
        added.append({name: x for name, x in table.items() if x is not old.get(name)})
    names = {name: x for name, x in vars(module).items() if callable(x) and not name.startswith("__")}
    return module.__name__, names, added


def tables():
    """The tables to which a reward file can add."""
    return REWARDS, ENVIRONMENTS, data.MASKS


def register_functions(names, path):
    """Loads reward_file. Functions without @reward that a run names become rewards without a range; another name of
    one with @reward is that reward."""
    import_rewards(names)
    functions = load_reward_file(path)
    for name in set(names) & set(functions):
        known = [each for each in REWARDS.values() if each.fn is functions[name]]
        if not str(functions[name].__module__).startswith("grpo."):  # such as @environment
            add(name, known[0] if known else Reward(functions[name]))


def check_records(name, records):
    """Raises Mistake with file and line of the first record that a reward cannot score."""
    needed, check = REWARDS[name].fields, REWARDS[name].check
    if REWARDS[name].messages:  # of TRL's form, which gets None where a record of another task lacks a field
        there = {key for record in records for key, x in record.items() if x is not None}
        needed = [key for key in needed if FIELD_OF.get(key, key) not in there]
    remedy = "add it, correct the parameter's name, or give it a default"
    if any(key.startswith("solution_str") for key in needed):
        remedy = "a reward function of verl needs the adapter of docs/coming_from.md"
    for record in records:
        for key in needed:
            if record.get(FIELD_OF.get(key, key)) is None:
                own = one_line(", ".join(sorted(record.keys() - OF_CONSUMER)))
                raise Mistake(f"{record['where']}: reward {name} needs the field '{key}' in every record, and this one "
                              f"has {own}; {remedy}")
        if check is not None:
            own = {key: x for key, x in record.items() if key not in OF_CONSUMER}
            try:
                with calling(check, f"reward {name} cannot score this record"):
                    check(**own)
            except Mistake as mistake:
                raise Mistake(f"{record['where']}: {mistake}") from None


def check_answer(answer, **columns):
    """Raises Mistake unless a record's `answer` is a text, a number, or a list of them, any of which is right."""
    alternatives = answer if isinstance(answer, (list, tuple)) else [answer]
    nested = [each for each in alternatives if each is None or isinstance(each, (dict, list, tuple))]
    if nested or not alternatives:
        raise Mistake(f"answer={shown(answer)} must be a text, a number, or a list of them, each of which is right")


def arguments(name, texts, known, empty):
    """The Call of a reward.

    texts: has prompts, completions, completion_ids and columns {field: list of N}
    known: {name: value} for keyword-only parameters, and trainer_state; it wins over a field of the same name
    empty: the fields of the data, some of which these records may lack
    """
    function, N = REWARDS[name], len(texts.completions)
    settings = {key: known[key] for key in function.settings & known.keys()}
    if function.gets("trainer_state"):
        settings["trainer_state"] = known["trainer_state"]
    prompts, completions = texts.columns.get("prompt", texts.prompts), texts.completions
    if function.messages:
        completions = [text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                       for prompt, text in zip(prompts, completions, strict=True)]
    columns = dict.fromkeys(empty, [None] * N) | texts.columns
    columns |= {"prompts": prompts, "completions": completions, "completion_ids": texts.completion_ids}
    columns = {other: columns[key] for other, key in FIELD_OF.items() if key in columns} | columns
    fields = {key: x for key, x in columns.items() if function.gets(key) and key not in settings}
    return Call(name, fields, settings, N)


@keep_torch_defaults()
def run_reward(call):
    """Calls a reward, here or in a worker process. Returns N floats, NaN for a skipped completion, and
    {metric: (sum, count)}. Raises Mistake if the function fails or returns not N values."""
    name, fields, settings, N = call
    import_rewards([name])  # a worker process does not have it yet
    fn, metrics = REWARDS[name].fn, {}

    def log_metric(key, value):
        key = one_line(key)
        if RESERVED.fullmatch(key):
            raise Mistake(f"log_metric({key!r}, ...): a run has this name for something else; give it another")
        if math.isfinite(value):
            metrics.update(join([metrics, {key: (float(value), 1)}]))

    # Copies, because a value of a record is one object for all completions and steps
    given = {key: x if key == "completion_ids" else [copy.deepcopy(value) for value in x] for key, x in fields.items()}
    logs = {"log_metric": log_metric, "log_extra": lambda column, values: None}
    given |= {key: log for key, log in logs.items() if REWARDS[name].gets(key)}
    place = definition(fn)
    try:
        with calling(fn, f"reward {name} failed"):
            returned = fn(**given, **settings)
            if inspect.iscoroutine(returned):
                returned = event_loop().run_until_complete(returned)
    except Mistake as mistake:
        are_texts = all(isinstance(completion, str) for completion in fields.get("completions", ()))
        if REWARDS[name].messages and are_texts and isinstance(mistake.__cause__, (TypeError, AttributeError)):
            raise Mistake(f"{mistake}, or write the prompts as messages: completions are texts because prompts are "
                          "texts") from mistake
        raise
    values, remedy = [], f"return a list of {N} values, each a number or None"
    with others(f"reward {name} returned something that is no list of numbers", remedy, place):
        if hasattr(returned, "tolist"):  # of numpy or torch
            is_column = getattr(returned, "shape", ()) == (N, 1)
            returned = returned.tolist()
            if is_column:
                returned = [x for x, in returned]
        for x in returned:
            is_skip = x is None or math.isnan(x)  # as in TRL
            values.append(math.nan if is_skip else float(x))
    if len(values) != N:
        raise Mistake(f"{place}: reward {name} returned {len(values)} values for {N} completions; {remedy}")
    return values, metrics
