"""Calls of environments, each with a limit of time; what they may return."""

import asyncio
import copy
import inspect
import json
import math
import time
from concurrent.futures import Future

from core.files.records import fault_of_messages
from core.prompts import OF_CONSUMER
from core.settings.user_code import UserCodeError, event_loop, naming_line_of, one_line, time_limit
from grpo.environments import find_environment


def environments_of(config):
    """The Environments of a run. config: environment, environment_file, reward_timeout"""
    return Environments(config.environment, config.environment_file, config.reward_timeout)


def check_begins(environments, data):
    """Raises ValueError if an environment cannot begin an episode with the first record of `data`, a PromptConsumer:
    then none would be played, and the run would learn nothing."""
    record = data.records["train"][0]
    began = environments.call({0: ("begin", 0, own_fields(record))})[0]
    environments.call({0: ("close",)})
    if isinstance(began, UserCodeError):
        raise ValueError(f"environment={environments.name!r} does not begin with {record['where']}: {began}; "
                         "correct the class or the record")


def own_fields(record):
    """A copy of the fields that a record has in the user's file."""
    return copy.deepcopy({key: x for key, x in record.items() if key not in OF_CONSUMER})


class Environments:
    """The environments of a process, by key. A call that is not done after `seconds` fails."""

    def __init__(self, name, path, seconds):
        self.name, self.seconds = name, seconds
        self.make = find_environment(name, path)
        self.of = {}

    def begin(self, key, seed, record):
        """Makes one. Returns what its reset returns: a prompt, or None."""
        self.of[key] = self.make(seed)
        return self.of[key].reset(record)

    def step(self, key, text):
        return self.of[key].step(text)

    def measure(self, key):
        """Returns {name: what one measured}."""
        return {name: getattr(self.of[key], name) for name in self.make.metrics}

    def close(self, key):
        one = self.of.pop(key, None)  # there is none if making it failed
        return one.close() if hasattr(one, "close") else None

    def call(self, calls):
        """calls: {key: (name of a method above, *arguments)}. Returns {key: what it returned, or a UserCodeError}. The
        methods of environments that are `async def` run at the same time. Raises ValueError for one that returns
        something else than it should."""
        started = {key: self.start(key, *call) for key, call in calls.items()}
        found, end = {}, time.monotonic() + self.seconds + 1
        for key, x in started.items():
            if isinstance(x, Future):
                x = self.attempt(x.result, max(0.0, end - time.monotonic()))
            found[key] = x if isinstance(x, UserCodeError) else self.checked(calls[key][0], x)
        return found

    def start(self, key, method, *arguments):
        """Calls a method. Returns what it returned, a UserCodeError, or a Future of what its coroutine returns."""
        x = self.attempt(getattr(self, method), key, *arguments)
        if inspect.iscoroutine(x):
            return asyncio.run_coroutine_threadsafe(asyncio.wait_for(self.guarded(x), self.seconds), event_loop())
        return x

    async def guarded(self, coroutine):
        """The result of a coroutine; an exit within becomes a UserCodeError, or it would end the loop."""
        try:
            return await coroutine
        except SystemExit as error:
            with naming_line_of(self.make):
                raise error

    def attempt(self, function, *arguments):
        """function(...), or a UserCodeError if it raises or takes too long."""
        try:
            with naming_line_of(self.make), time_limit(self.seconds):
                return function(*arguments)
        except UserCodeError as error:
            return error

    def checked(self, method, result):
        """Returns what a method returned, in Python's own types. Raises ValueError with what it should be."""
        if method == "close":
            return None
        convert, wanted = RETURNS[method]
        try:
            return convert(result)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"environment={self.name!r}: its {wanted}, not {one_line(result, write=repr)}") from None


def text_or_messages(x):
    """A text, messages or None, without classes of the user's."""
    x = json.loads(json.dumps(x))
    if x is None or isinstance(x, str) or not fault_of_messages(x):
        return x
    raise ValueError


def answer_and_reward(result):
    """The answer and the reward of a step."""
    answer, reward = result
    return text_or_messages(answer), finite_number(reward)


def pairs_of_numbers(measured):
    """{name: (sum, count)}"""
    pairs = {}
    for name, pair in measured.items():
        total, count = map(finite_number, pair)
        pairs[name] = total, count
    return pairs


def finite_number(x):
    """A finite number."""
    if math.isfinite(x):
        return float(x)
    raise ValueError


RETURNS = {"begin": (text_or_messages, "reset must return None, a text or messages"),
           "step": (answer_and_reward, "step must return (a text, messages or None, a finite number)"),
           "measure": (pairs_of_numbers, "metrics must be pairs (sum, count) of finite numbers")}
