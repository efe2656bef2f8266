"""Calls of environments, with a limit of time: in this process, or in worker processes."""

import asyncio
import contextlib
import copy
import inspect
import itertools
import math
import os
import time
from collections import deque
from concurrent.futures import CancelledError, Future
from multiprocessing.connection import wait

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
from grpo.sandbox.folder import empty_place
from grpo.sandbox.processes import END_SECONDS, ENDED, Processes, received
from grpo.sandbox.run import found_here, take_over


def environments_of(config):
    """Returns the object that calls the environments of a run. Those of a slow class are in worker processes, if there
    are any.

    config: environment, environment_file, reward_timeout, reward_workers
    """
    where = config.environment, config.environment_file, config.reward_timeout
    slow = getattr(find_environment(*where[:2]), "slow", False)
    if slow and config.reward_workers > 0:
        return RemoteEnvironments(*where, config.reward_workers)
    return Environments(*where)


def check_begins(config, data):
    """Raises ValueError if the environment of a config cannot begin an episode with the first record of `data`, a
    PromptConsumer: then none would be played, and the run would learn nothing. An environment of a slow class is not
    made here, since it may end the process."""
    cls = find_environment(config.environment, config.environment_file)
    record = data.records["train"][0]
    if hasattr(cls, "tools"):
        data.format.with_tools(cls.tools, data.tokenizer)
    if getattr(cls, "slow", False):
        return
    one = Environments(config.environment, config.environment_file, config.reward_timeout)
    began = one.call({0: ("begin", 0, own_fields(record))})[0]
    one.call({0: ("close",)})
    if isinstance(began, UserCodeError):
        raise ValueError(f"environment={config.environment!r} does not begin with {record['where']}: {began}; "
                         "correct the class or the record")


def own_fields(record):
    """A copy of the fields that a record has in the user's file."""
    return copy.deepcopy({key: x for key, x in record.items() if key not in OF_CONSUMER})


class Environments:
    """The environments of a process, by key. A call that is not done after `seconds` fails."""

    def __init__(self, name, path, seconds):
        self.make, self.seconds = find_environment(name, path), seconds
        self.place = place_of(name, path)
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
        methods of environments that are `async def` run at the same time. Raises ValueError for a step that returns
        something else than it should."""
        found = {key: self.start(key, *call) for key, call in calls.items()}
        until = time.monotonic() + self.seconds + 1  # a coroutine ends by itself after `seconds`, if it can
        for key, x in found.items():
            if isinstance(x, Future):
                found[key] = self.result(x, until)
            if calls[key][0] == "step":
                found[key] = checked(found[key])
        return found

    def start(self, key, method, *arguments):
        """Calls a method. Returns what it returned, for an `async def` function a Future, or a UserCodeError."""
        try:
            with naming_line_of(self.make), time_limit(self.seconds, waiting=True):
                x = getattr(self, method)(key, *arguments)
        except UserCodeError as error:
            return error
        if inspect.iscoroutine(x):
            return asyncio.run_coroutine_threadsafe(self.awaited(x), event_loop())
        return x

    async def awaited(self, coroutine):
        """Returns what a coroutine returns, or a UserCodeError."""
        try:
            return await asyncio.wait_for(self.caught(coroutine), self.seconds)
        except TimeoutError as error:
            found = as_user_error(error.__cause__ or error, self.make)
            return late(found.line, self.seconds)

    async def caught(self, coroutine):
        """The same without a limit of time. No exit may leave it, since that would end the event loop."""
        try:
            with naming_line_of(self.make):
                return await coroutine
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
            return late(self.place, self.seconds)
        except CancelledError:
            return UserCodeError(self.place, "CancelledError: its coroutine was cancelled")


def place_of(name, path):
    """The file and the name of a class, for errors that no line of it can be named for."""
    return name if path is None else f"{shortest(path)}, class {name}"


def late(place, seconds):
    """The error of a call that takes too long."""
    return UserCodeError(place, f"OutOfTime: it was not done after {seconds} seconds")


def checked(result):
    """The answer and the reward of a step, or its UserCodeError. Raises ValueError unless they are a text, messages or
    None, and a finite number."""
    if isinstance(result, UserCodeError):
        return result
    try:
        answer, reward = result
        if is_answer(answer) and math.isfinite(reward):
            return answer, float(reward)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError("the step of an environment must return (a text, messages or None, a finite number), not "
                     f"{one_line(result, write=repr)}")


def is_answer(x):
    """True for None, a text, and messages."""
    return x is None or isinstance(x, str) or not fault_of_messages(x)


class RemoteEnvironments:
    """Environments in `count` worker processes. A process in which a call is not done after `seconds`, and a few more
    in which it may end the call by itself, is killed, and all its environments fail."""

    def __init__(self, name, path, seconds, count):
        path = path and os.path.abspath(path)
        self.place = place_of(name, path)
        self.workers = Processes(count, seconds, call_here, begin_process, name, path, seconds, found_here())
        self.home = {}  # {key: the pipe to its process}
        self.numbers = itertools.count()

    def call(self, calls):
        """Calls environments, as Environments.call does."""
        processes = self.workers.processes
        self.workers.end([pipe for pipe, process in processes.items() if not process.is_alive()])
        self.workers.start_missing()
        pipes = list(processes)
        waiting = {pipe: deque() for pipe in pipes}
        found = {}
        for key, call in calls.items():
            if key not in self.home:
                number = next(self.numbers)
                self.home[key] = pipes[number % len(pipes)]
            pipe = self.home[key]
            if pipe in waiting:
                waiting[pipe].append((key, call))
            else:
                found[key] = self.ended()
            if call[0] == "close":
                del self.home[key]
        return found | self.answers(waiting)

    def answers(self, waiting):
        """The answers of processes, each to one call after another. waiting: {pipe: its (key, call)}"""
        found, busy = {}, {}  # busy: {pipe: (key, when its answer is late)}
        try:
            while True:
                for pipe, own in waiting.items():
                    if own and pipe not in busy:
                        key, call = own.popleft()
                        busy[pipe] = key, time.monotonic() + self.workers.timeout + END_SECONDS
                        with contextlib.suppress(*ENDED):  # `received` raises it again
                            pipe.send(({key: call},))
                if not busy:
                    return found
                first = min(until for _, until in busy.values())
                ready = wait(list(busy), max(0.0, first - time.monotonic()))
                for pipe in ready:
                    key, _ = busy.pop(pipe)
                    try:
                        found |= received(pipe)
                    except ENDED:
                        found |= self.lost(pipe, key, waiting, self.ended())
                overdue = [pipe for pipe, (_, until) in busy.items() if until <= time.monotonic()]
                for pipe in overdue:
                    key, _ = busy.pop(pipe)
                    found |= self.lost(pipe, key, waiting, late(self.place, self.workers.timeout))
        finally:
            self.workers.end(busy)  # an answer that nobody has read would be taken for that of the next call

    def lost(self, pipe, key, waiting, error):
        """Ends a process. Returns {key: the error} of the call that it had, and of those that wait for it."""
        self.workers.end([pipe])
        empty_place()  # it cannot remove the folder in which its code ran
        keys = [key, *(other for other, _ in waiting[pipe])]
        waiting[pipe].clear()
        return dict.fromkeys(keys, error)

    def ended(self):
        return UserCodeError(self.place, "the process of the environment has ended")


def begin_process(name, path, seconds, sandbox):
    """Makes the Environments of a worker process. sandbox: found_here() of the main process"""
    global here
    take_over(*sandbox)
    here = Environments(name, path, seconds)


def call_here(calls):
    """Calls those of a worker process."""
    return here.call(calls)
