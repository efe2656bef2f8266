"""Calls of environments, each with a limit of time. What they return is converted within it."""

import asyncio
import copy
import inspect
import json
import math
import threading
import time
from concurrent.futures import CancelledError, Future

from core.files.records import fault_of_messages
from core.prompts import OF_CONSUMER
from core.settings.user_code import (
    UserCodeError,
    as_user_error,
    event_loop,
    naming_line_of,
    one_line,
    shortest,
    time_limit,
)
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
        self.place = name if path is None else f"{shortest(path)}, class {name}"  # for errors without a line of it
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
        methods of environments that are `async def`, or whose class says `slow = True`, run at the same time. Raises
        ValueError for one that returns something else than it should."""
        found = {key: self.start(key, *call) for key, call in calls.items()}
        until = time.monotonic() + self.seconds + 1  # a coroutine ends by itself after `seconds`, if it can
        for key, x in found.items():
            if isinstance(x, Future):
                found[key] = self.result(x, until)
            if type(found[key]) is ValueError:
                raise found[key]
        return found

    def start(self, key, method, *arguments):
        """Calls a method. Returns what `checked` makes of its result, a UserCodeError, or, for what goes on at the same
        time, a Future of one of them."""
        if getattr(self.make, "slow", False):
            return self.in_thread(method, key, *arguments)
        try:
            with naming_line_of(self.make), time_limit(self.seconds, waiting=True):
                x = getattr(self, method)(key, *arguments)
                if not inspect.iscoroutine(x):
                    return self.checked(method, x)
        except UserCodeError as error:
            return error
        return asyncio.run_coroutine_threadsafe(self.awaited(method, x), event_loop())

    def in_thread(self, method, *arguments):
        """A Future of the same, from a thread of its own. One that never ends does not keep the process alive."""
        future = Future()

        def work():
            try:
                with naming_line_of(self.make):
                    x = getattr(self, method)(*arguments)
                    if inspect.iscoroutine(x):
                        x = asyncio.run(x)
                    future.set_result(self.checked(method, x))
            except UserCodeError as error:
                future.set_result(error)

        threading.Thread(target=work, daemon=True).start()
        return future

    async def awaited(self, method, coroutine):
        """The same of a coroutine."""
        try:
            return await asyncio.wait_for(self.caught(method, coroutine), self.seconds)
        except TimeoutError as error:
            found = as_user_error(error.__cause__ or error, self.make)
            return self.late(found.line)

    async def caught(self, method, coroutine):
        """The same without a limit of time. No exit may leave it, since that would end the event loop."""
        try:
            with naming_line_of(self.make):
                return self.checked(method, await coroutine)
        except UserCodeError as error:
            if isinstance(error.__cause__, asyncio.CancelledError):  # its time is over
                raise error.__cause__ from None
            return error

    def result(self, future, until):
        """The result of `awaited`; an event loop that a coroutine holds up is left to itself, and a new one begins."""
        try:
            return future.result(max(0.0, until - time.monotonic()))
        except TimeoutError:
            event_loop.cache_clear()
            return self.late(self.place)
        except CancelledError:
            return UserCodeError(self.place, "CancelledError: its coroutine was cancelled")

    def late(self, line):
        """The error of a call that takes too long."""
        return UserCodeError(line, f"OutOfTime: it was not done after {self.seconds} seconds")

    def checked(self, method, result):
        """Returns what a method returned, in Python's own types; a ValueError in its place says what it should be."""
        if method == "close":
            return None
        convert, wanted = RETURNS[method]
        try:
            return convert(result)
        except (TypeError, ValueError, OverflowError):
            return ValueError(f"environment={self.name!r}: its {wanted}, not {one_line(result, write=repr)}")


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
