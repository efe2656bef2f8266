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

import numpy as np

from core import data
from core.data import FIELDS, NOT_FOR_REWARDS
from core.device import keep_torch_defaults
from core.errors import USER_FILES, Mistake, calling, definition, is_own_function, one_line, others
from core.settings.setting import shown
from core.user_files import load_user_file


@dataclass(frozen=True)
class Reward:
    """A function of the table, with the arguments of its `@reward`."""
    fn: Callable                    # returns N floats, or None for a completion that it skips
    low: float = -math.inf          # its smallest and largest value
    high: float = math.inf
    slow: bool = False              # runs in worker processes, if there are any, with a deadline
    check: Callable | None = None   # check(**fields of a record) raises ValueError if the record cannot be scored
    tags: tuple = ()                # texts that it looks for in completions; a prompt should mention them
    messages: bool = True           # where the prompt is messages, the completion is a list with a message, as in TRL

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
        """The fields that every record must have: parameters without a default."""
        fields = []
        for key, p in self.parameters.items():
            is_required = p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty
            if is_required and key not in FROM_THE_RUN:
                fields.append(key)
        return fields

    def accepts(self, key):
        """True if the function takes an argument of this name: it has such a parameter, or **columns."""
        has_columns = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        return has_columns or key in self.parameters


class Call(NamedTuple):
    """A call of a reward, as worker processes get it."""
    name: str        # of the reward
    fields: dict     # {parameter: list of N}
    settings: dict   # {other parameter: value}
    N: int           # completions


REWARDS: dict[str, Reward] = {}
ENVIRONMENTS = {}  # {name: class}, see grpo/environments.py
OWN_MASKS = dict(data.MASKS)  # a reward file may replace one
# {id of a function or object with @reward: its Reward}. By id, because an object of the user's need not be hashable. No
# other object gets this id, because the Reward keeps the object
DECORATED: dict[int, Reward] = {}
MODULES = ("judge", "text", "verify_math", "verify_code", "reward_model")  # of our rewards, in this folder
# Metrics that the trainer adds to the metrics of a step, and its prefixes of metrics
RESERVED = re.compile("step|lr|kl_beta|tokens_per_second|(eval|time|skipped)/.*")
FROM_THE_RUN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
FIELD_OF = {name: own for own, names in FIELDS.items() for name in names}  # {a name in other data sets: ours}
RUNNER = asyncio.Runner()  # one event loop for all calls, so that connections of async rewards stay open


def reward(low=-math.inf, high=math.inf, slow=False, check=None, tags=()):
    """Registers a function in REWARDS under its own name and returns it unchanged: @reward, or @reward(low, high, ...).
    An object with __call__ gets the name of its variable in the reward file: `brief = reward(0, 1)(Brief(40))`.

    The function gets the arguments that its signature names; **columns takes all others except settings:
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
    fields of every record, and the run lists the `tags` that no prompt mentions.
    """
    if callable(low):  # @reward without arguments
        return reward()(low)

    def register(fn):
        if isinstance(fn, type):
            raise Mistake(f"{definition(fn)}: @reward is for functions and objects, not for the class "
                          f"{one_line(fn.__name__)}; name an object of it, as in brief = reward(0, 1)(Brief())")
        all_tags = [tags] if isinstance(tags, str) else tags
        new = Reward(
            fn,
            float(low),
            float(high),
            slow,
            check,
            tuple(all_tags),
            messages=False)
        DECORATED[id(fn)] = new
        if hasattr(fn, "__name__"):
            add_reward(one_line(fn.__name__), new)
        return fn

    return register


def import_rewards(names=None):
    """Imports our rewards, one module after another, until REWARDS has these names; None: all."""
    for module in MODULES:
        if names is None or not REWARDS.keys() >= set(names):
            importlib.import_module(f"grpo.reward_functions.{module}")


def add_reward(name, new):
    """Adds a Reward to the table. Raises Mistake if a reward of this project has this name."""
    known = REWARDS.get(name, new).fn
    module = str(known.__module__)
    new_module = str(new.fn.__module__)
    if new_module != module and is_own_function(known):
        raise Mistake(f"reward {name} is one of this project's: give your function another name")
    if new_module.startswith(f"{module}."):
        return  # a neighbour of the user's file does not replace a reward of the file
    REWARDS[name] = new


def load_reward_file(path):
    """Runs a Python file once. Afterwards the tables have its rewards, masks and environments, and no entries of other
    user files: runs of one process, each with its own file, may alternate.
    Returns {name: function or class} of the file; {} if the path is None."""
    root, functions, added = run_reward_file(path)
    for table, new in zip(tables(), added, strict=True):
        for name, entry in list(table.items()):
            function = entry.fn if isinstance(entry, Reward) else entry
            module = f"{function.__module__}."  # with the dot, because mine is no part of mine2
            if module.startswith(USER_FILES) and not module.startswith(f"{root}."):
                del table[name]
        table.update(new)
    for name, mask in OWN_MASKS.items():  # another file may have replaced one
        data.MASKS.setdefault(name, mask)
    return functions


@functools.cache
def run_reward_file(path):
    """Returns the name of the file's module, {name: function or class} of the file, and for each of `tables()` a
    {name: entry} of the entries that the file added."""
    if path is None:
        return "", {}, [{} for _ in tables()]
    if not os.path.isfile(path):
        raise Mistake(f"reward_file={path} does not exist; correct the path")
    import_rewards()  # the file may build on them, and may not take their names
    before = [dict(table) for table in tables()]
    with keep_torch_defaults():
        module = load_user_file(path)
    neighbours = [x for name, x in sys.modules.items() if name.startswith(f"{module.__name__}.")]
    for file in [*neighbours, module]:  # the file comes last: its objects win over a neighbour's
        for name, x in vars(file).items():
            if id(x) in DECORATED and not hasattr(x, "__name__"):  # an object, named by its variable
                add_reward(name, DECORATED[id(x)])
    added = []
    for table, old in zip(tables(), before, strict=True):
        new = {name: x for name, x in table.items() if x is not old.get(name)}
        added.append(new)
    functions = {name: x for name, x in vars(module).items() if callable(x)}
    return module.__name__, functions, added


def tables():
    """The tables to which a reward file can add."""
    return REWARDS, ENVIRONMENTS, data.MASKS


def register_functions(names, path, given=()):
    """Loads the reward_file at `path`. A function without @reward becomes a reward without a range if it is one of the
    `names`. A second name for a function with @reward is the same reward.
    given: {name: function} from Python, which get completions as texts"""
    import_rewards(names)
    functions = load_reward_file(path) | dict(given)
    for name in set(names) & set(functions):
        function = functions[name]
        if not callable(function):
            raise Mistake(f"the reward {name} is {shown(function)}; make it a function")
        is_ours = str(function.__module__).startswith("grpo.")  # such as @environment
        if name in given or not is_ours:
            entry = DECORATED.get(id(function)) or Reward(function, messages=name not in given)
            add_reward(name, entry)


def check_records(name, records):
    """Raises Mistake with file and line of a record that lacks a field, or that the reward's check refuses."""
    function = REWARDS[name]
    for key in function.fields:
        field = FIELD_OF.get(key, key)
        lacking = [record for record in records if record.get(field) is None]
        # A function of TRL's form gets None where a record of another task lacks the field
        is_optional = function.messages and len(lacking) < len(records)
        if lacking and not is_optional:
            record = lacking[0]
            remedy = "add it, correct the parameter's name, or give it a default"
            if any(each.startswith("solution_str") for each in function.fields):
                remedy = "a reward function of verl needs the adapter of docs/coming_from.md"
            names = sorted(record.keys() - NOT_FOR_REWARDS)
            raise Mistake(f"{record['where']}: reward {name} needs the field '{key}' in every record, and this one "
                          f"has {one_line(', '.join(names))}; {remedy}")
    if function.check is None:
        return
    for record in records:
        fields = {key: x for key, x in record.items() if key not in NOT_FOR_REWARDS}
        try:
            with calling(function.check, f"reward {name} cannot score this record"):
                function.check(**fields)
        except Mistake as mistake:
            raise Mistake(f"{record['where']}: {mistake}") from None


def check_answer(answer, **columns):
    """Raises Mistake unless a record's `answer` is a text, a number, or a list of them, each of which is correct."""
    alternatives = answer if isinstance(answer, (list, tuple)) else [answer]
    wrong = [each for each in alternatives if each is None or isinstance(each, (dict, list, tuple))]
    if wrong or not alternatives:
        raise Mistake(f"answer={shown(answer)} must be a text, a number, or a list of them, each of which is correct")


def arguments(name, texts, known, all_fields):
    """The Call of a reward.

    texts: has prompts, completions, completion_ids and columns {field: list of N}
    known: {name: value} for keyword-only parameters, and trainer_state; it wins over a field of the same name
    all_fields: the names of all fields in the data; the records of these texts may lack some
    """
    function = REWARDS[name]
    settings = {key: known[key] for key in function.settings & known.keys()}
    if function.accepts("trainer_state"):
        settings["trainer_state"] = known["trainer_state"]
    columns = fields_of_texts(texts, function.messages, all_fields)
    # The fields also have the names of other data sets, such as `solution` for `answer`
    renamed = {other: columns[own] for other, own in FIELD_OF.items() if own in columns}
    columns = renamed | columns
    fields = {}
    for key, values in columns.items():
        if function.accepts(key) and key not in settings:
            fields[key] = values
    return Call(name, fields, settings, len(texts.completions))


def fields_of_texts(texts, messages, all_fields):
    """{field: list of N} of texts, as a reward gets them. The prompt is the record's, not rendered by a template.
    messages: as in Reward"""
    prompts = texts.columns.get("prompt", texts.prompts)
    completions = texts.completions
    if messages:
        completions = []
        for prompt, text in zip(prompts, texts.completions, strict=True):
            if not isinstance(prompt, str):
                text = [{"role": "assistant", "content": text}]
            completions.append(text)
    lacking = dict.fromkeys(all_fields, [None] * len(completions))
    from_the_run = {"prompts": prompts, "completions": completions, "completion_ids": texts.completion_ids}
    return lacking | texts.columns | from_the_run


@keep_torch_defaults()
def run_reward(call):
    """Calls a reward, here or in a worker process. Returns N floats, NaN for a skipped completion, and
    {metric: (sum, count)}. Raises Mistake if the function fails or does not return N values."""
    import_rewards([call.name])  # a worker process does not have it yet
    function = REWARDS[call.name]
    metrics = {}

    def log_metric(key, value):
        key = one_line(key)
        if RESERVED.fullmatch(key):
            raise Mistake(f"log_metric({key!r}, ...): a run uses this name for something else; take another name")
        if math.isfinite(value):
            total, count = metrics.get(key, (0.0, 0))
            metrics[key] = total + float(value), count + 1

    given = dict(call.settings)
    for key, values in call.fields.items():
        if key != "completion_ids":  # copies, because all completions and steps share the values of a record
            values = [copy.deepcopy(value) for value in values]
        given[key] = values
    if function.accepts("log_metric"):
        given["log_metric"] = log_metric
    if function.accepts("log_extra"):
        given["log_extra"] = lambda column, values: None
    try:
        with calling(function.fn, f"reward {call.name} failed"):
            returned = function.fn(**given)
            if inspect.iscoroutine(returned):
                returned = RUNNER.run(returned)
    except Mistake as mistake:
        completions = call.fields.get("completions", ())
        are_texts = all(isinstance(completion, str) for completion in completions)
        if function.messages and are_texts and isinstance(mistake.__cause__, (TypeError, AttributeError)):
            raise Mistake(f"{mistake}, or write the prompts as messages: completions are texts because prompts are "
                          "texts") from mistake
        raise
    return numbers(returned, call.name, call.N), metrics


def numbers(returned, name, N):
    """The N floats that a reward returned, NaN for a skipped completion. Raises Mistake for anything else."""
    place = definition(REWARDS[name].fn)
    remedy = f"return a list of {N} values, each a number or None"
    values = []
    with others(f"reward {name} returned something that is no list of numbers", remedy, place):
        if hasattr(returned, "tolist"):  # an array of numpy, or a tensor
            is_column = np.shape(returned) == (N, 1)
            returned = returned.tolist()
            if is_column:
                returned = [row[0] for row in returned]
        for x in returned:
            is_skip = x is None or math.isnan(x)  # as in TRL
            values.append(math.nan if is_skip else float(x))
    if len(values) != N:
        raise Mistake(f"{place}: reward {name} returned {len(values)} values for {N} completions; {remedy}")
    return values
