"""Calls of environments, with a limit of time: in this process, or in worker processes."""

import asyncio
import contextlib
import functools
import inspect
import itertools
import os
import time
from collections import defaultdict
from concurrent.futures import Future

from core.settings.user_code import UserCodeError, definition, event_loop, naming_line_of, time_limit
from grpo.environments import find_environment
from grpo.sandbox.processes import END_SECONDS, ENDED, Processes, received


@functools.cache
def environments_of(name, path, seconds, workers):
    """Returns the object that calls the environments of a class. Those of a slow class are in worker processes, if
    there are any."""
    slow = getattr(find_environment(name, path), "slow", False)
    if slow and workers > 0:
        return RemoteEnvironments(name, path, seconds, workers)
    return Environments(name, path, seconds)


class Environments:
    """The environments of a process, by key. A call that is not done after `seconds` fails."""

    def __init__(self, name, path, seconds):
        self.make, self.seconds = find_environment(name, path), seconds
        self.of = {}

    def begin(self, key, seed, record):
        """Makes one. Returns what its reset returns: a prompt, or None."""
        self.of[key] = self.make(seed)
        return self.of[key].reset(record)

    def step(self, key, text):
        return self.of[key].step(text)

    def measure(self, key):
        """Returns {name: what one measured}."""
        one = self.of.get(key)  # there is none if making it failed
        return {name: getattr(one, name, (0, 0)) for name in self.make.metrics}

    def close(self, key):
        one = self.of.pop(key, None)
        return one.close() if hasattr(one, "close") else None

    def call(self, calls):
        """calls: {key: (name of a method above, *arguments)}. Returns {key: what it returned, or a UserCodeError}. The
        methods of environments that are `async def` run at the same time."""
        found = {key: self.start(key, *call) for key, call in calls.items()}
        for key, x in found.items():
            if isinstance(x, Future):
                found[key] = self.with_line(x.result)
        return found

    def start(self, key, method, *arguments):
        """Calls a method. Returns what it returned, for an `async def` function a Future, or a UserCodeError."""
        def limited():
            with time_limit(self.seconds, waiting=True):
                return getattr(self, method)(key, *arguments)

        x = self.with_line(limited)
        if inspect.iscoroutine(x):
            return asyncio.run_coroutine_threadsafe(self.awaited(x), event_loop())
        return x

    async def awaited(self, coroutine):
        try:
            return await asyncio.wait_for(coroutine, self.seconds)
        except asyncio.TimeoutError:
            raise TimeoutError(f"it was not done after {self.seconds} seconds") from None

    def with_line(self, function):
        """Returns what a function returns, or a UserCodeError with the line of the class that raised within."""
        try:
            with naming_line_of(self.make):
                return function()
        except UserCodeError as error:
            return error


class RemoteEnvironments:
    """Environments in `count` worker processes. One that has not answered `seconds` after it was called, and a few more
    in which it may end a call by itself, is killed, and all its environments fail."""

    def __init__(self, name, path, seconds, count):
        path = path and os.path.abspath(path)
        self.place = definition(find_environment(name, path))
        self.workers = Processes(count, seconds, call_here, begin_process, name, path, seconds)
        self.home = {}  # {key: the pipe to its process}
        self.numbers = itertools.count()

    def call(self, calls):
        """Calls environments, as Environments.call does."""
        self.workers.start_missing()
        pipes = list(self.workers.processes)
        parts = defaultdict(dict)  # {pipe: {key: call}}
        for key, call in calls.items():
            if key not in self.home:
                number = next(self.numbers)
                self.home[key] = pipes[number % len(pipes)]
            pipe = self.home[key]
            parts[pipe][key] = call
            if call[0] == "close":
                del self.home[key]
        for pipe, part in parts.items():
            with contextlib.suppress(*ENDED):  # `answers` finds it out
                pipe.send((part,))
        until = time.monotonic() + self.workers.timeout + END_SECONDS
        found = {}
        for pipe, part in parts.items():
            found |= self.answers(pipe, part, until)
        return found

    def answers(self, pipe, part, until):
        """Returns the answers of the process at the other end of a pipe to its part of the calls."""
        what = "the process of the environment has ended"
        if pipe in self.workers.processes:
            with contextlib.suppress(*ENDED):
                left = until - time.monotonic()
                if pipe.poll(max(0.0, left)):
                    return received(pipe)
                what = f"TimeoutError: it was not done after {self.workers.timeout} seconds"
            self.workers.end([pipe])
        return {key: UserCodeError(self.place, what) for key in part}


def begin_process(name, path, seconds):
    """Makes the Environments of a worker process."""
    global here
    here = Environments(name, path, seconds)


def call_here(calls):
    """Calls those of a worker process."""
    return here.call(calls)
