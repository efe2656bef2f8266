"""Environments as TRL users have them (environment_factory), unchanged: the public methods of a class are tools.

class Adder:
    def reset(self, **columns): ...        # gets the record; may return a text, which is appended to the prompt
    def add(self, a: int, b: int) -> int:  # a tool; its docstring and types describe it to the model
    def get_reward(self) -> float: ...
"""

import asyncio
import inspect
import json
import re

from core.prompts import TOOL_CALL, as_messages
from core.settings.optional import require
from core.settings.user_code import (
    OutOfTime,
    OwnRandom,
    UserCodeError,
    event_loop,
    guarded,
    naming_line_of,
    replace_event_loop_if_held,
)
from grpo.reward_functions.trl import under_all_names

CALL = re.compile(TOOL_CALL + "(.*?)</tool_call>", re.DOTALL)
NOT_TOOLS = ("reset", "get_reward")


def with_tools(cls):
    """A class of TRL's kind as one for @environment. Raises ValueError if it cannot be one."""
    for method in NOT_TOOLS:
        if not hasattr(cls, method):
            raise ValueError(f"environment={cls.__name__!r} has neither @environment nor the method {method} of a "
                             "class for TRL's environment_factory; write one of them")
    names = [name for name, _ in inspect.getmembers(cls, inspect.isfunction) if not name.startswith("_")]
    names = [name for name in names if name not in NOT_TOOLS]
    utils = require("transformers", f"environment={cls.__name__!r}").utils
    tools = []
    for name in names:
        with guarded(f"environment={cls.__name__!r}: {name} is no tool", "give it types and a docstring with Args:"):
            tools.append(utils.get_json_schema(getattr(cls, name)))
    return type(cls.__name__, (WithTools,), {"played": cls, "names": names, "tools": tools})


class WithTools:
    """Plays a class of TRL's kind. A turn without a call of a tool ends the episode; the rewards of all turns add up to
    what get_reward returns in the end. Such a class gets no seed: what it draws from `random` is the same for a group.
    """

    metrics = ("calls", "failures")

    def __init__(self, seed):
        self.random, self.given = OwnRandom(seed), 0.0
        self.calls = self.failures = (0, 1)

    def reset(self, record):
        messages = as_messages(record["prompt"])
        with self.random:
            self.own = self.played()
            added = finished(self.own.reset(**wanted(self.own.reset, under_all_names(record))))
        last = messages[-1]
        return [*messages[:-1], {**last, "content": last["content"] + (added or "")}]

    def step(self, text):
        with self.random:
            answers = [self.answer(call) for call in calls_in(text)]
            reward = finished(self.own.get_reward())
        earlier, self.given = self.given, reward
        return answers or None, reward - earlier

    def answer(self, call):
        """Calls a tool. Returns the message with its result, or with the error that it raised."""
        name = call["name"]
        self.calls = self.calls[0] + 1, 1
        error = f"Tool {name} not found."
        if name in self.names:
            try:
                tool = getattr(self.own, name)
                with naming_line_of(tool):
                    return message(name, finished(tool(**call["arguments"])))
            except UserCodeError as raised:
                if isinstance(raised.__cause__, OutOfTime):  # of the whole step, not an error of the tool
                    raise raised.__cause__ from None
                error = str(raised.__cause__)
        self.failures = self.failures[0] + 1, 1
        return message(name, {"error": error})


def message(name, result):
    """The message with the result of a tool."""
    return {"role": "tool", "name": name, "content": str(result)}


def calls_in(text):
    """The calls of tools in a turn, {"name", "arguments"}. What is not written as one is none."""
    calls = []
    for written in CALL.findall(text):
        try:
            call = json.loads(written)
        except (ValueError, RecursionError):
            continue
        if isinstance(call, dict) and isinstance(call.get("arguments"), dict) and isinstance(call.get("name"), str):
            calls.append(call)
    return calls


def wanted(function, columns):
    """The columns that a function has parameters for; with **kwargs all of them."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return columns
    names = {parameter.name for parameter in parameters}
    return {name: x for name, x in columns.items() if name in names}


def finished(result):
    """Returns the result of a function, also of an `async def` function."""
    if not inspect.iscoroutine(result):
        return result
    future = asyncio.run_coroutine_threadsafe(result, event_loop())
    try:
        return future.result()
    except OutOfTime:
        future.cancel()
        replace_event_loop_if_held()
        raise
