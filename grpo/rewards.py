"""The rewards of a run: a weighted sum of named functions. As a script, it lists them.

python grpo/rewards.py lists the built-in rewards with their ranges, and the presets; it has no options but --help.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import difflib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Self

import torch

from core.data import NOT_FOR_REWARDS
from core.errors import Mistake, UsageError, is_own_function, run_script
from core.settings.setting import Settings, shown
from grpo.reward_functions.registry import (
    REWARDS, arguments, check_records, import_rewards, load_reward_file, register_functions, reward, run_reward)
from grpo.reward_functions.presets import PRESET_SUCCESS, PRESETS
from grpo.rollout import Rollouts, Scored, Texts, join

__all__ = ["PRESETS", "REWARDS", "Rewards", "Scored", "reward"]
# {parameter for the model of a reward: the setting that names the model}
MODELS = {"judge_model": "judge_checkpoint", "reward_scorer": "reward_model_checkpoint"}
ONLY_HERE = {*MODELS, "group_size", "texts"}  # parameters whose values worker processes do not get


class Rewards:
    """The rewards of a run. A call with rollouts returns Scored:

    reward: the weighted sum of the functions; NaN where a completion is left out (`total`)
    values: NaN where a function skipped a completion, or was late

    judge: a Judge, reward_scorer: a RewardModel; None if no reward needs it
    functions: {name: function} of rewards that are in no file
    With a credit_window, make_rewards of grpo/build.py makes a subclass that gives each token a credit.
    """

    def __init__(
            self,
            config: Settings,
            judge: Any = None,
            reward_scorer: Any = None,
            functions: dict | None = None):
        self.config = config
        self.functions = functions or {}
        self.names = config.reward_names
        self.weights = config.reward_weights or (1.0,) * len(self.names)
        self.models = {"judge_model": judge, "reward_scorer": reward_scorer}
        self.fields = set()  # names of the records' fields, set by `check`
        self.state = SimpleNamespace(global_step=0, max_steps=config.max_iters)  # as in transformers' TrainerState
        register_functions(self.names, config.reward_file, self.functions)
        for name in self.names:
            check_reward(name, config.reward_file, self.models)
        check_settings(config.reward_settings or {}, self.names)
        for name in config.slow_rewards:
            if name not in self.names:
                raise Mistake(f"slow_rewards: {name!r} is no reward of this run ({hint(name, self.names)}); correct "
                              "the name or leave it out")
            if REWARDS[name].settings & ONLY_HERE or name in self.functions:
                raise Mistake(f"slow_rewards: worker processes get no models, no whole groups and no functions from "
                              f"Python, so {name} cannot run there; leave it out")
        self.success = success_reward(config)
        slow = {name for name in self.names if REWARDS[name].slow or name in config.slow_rewards}
        self.slow = slow - self.functions.keys()  # those do not reach worker processes
        self.seconds = {}  # {name: wall seconds of its last call}
        self.workers = None
        if config.reward_workers and self.slow:
            from grpo.reward_functions.workers import Workers
            self.workers = Workers(config.reward_workers, config.reward_timeout, config.reward_file, self.names)

    @classmethod
    def of(cls, config: Settings, **functions: Callable) -> Self:
        """Returns Rewards of Python functions by name, in place of the reward_functions of the config:

            Rewards.of(config, brief=lambda completions, **columns: [float(len(text) < 20) for text in completions])

        They are called as those with @reward, which gives them a range: `brief=reward(0, 1)(...)`.
        """
        config = replace(config, reward_functions=tuple(functions))
        return cls(config, functions=functions)

    @torch.no_grad()
    def __call__(self, rollouts: Rollouts) -> Scored:
        device = rollouts.target.device
        G = rollouts.group_size
        if not self.names:  # a teacher without rewards
            return Scored(torch.zeros(rollouts.problems, G, device=device))
        values, metrics = self.score(rollouts.texts, G)
        for name, seconds in self.seconds.items():
            metrics[f"time/reward/{name}"] = seconds, 1
        for name, on_cpu in values.items():
            values[name] = on_cpu.to(device, non_blocking=True)                      # (N,)
        total = self.total(values, G).view(-1, G)                                    # (P, G)
        return Scored(total, values=values, metrics=metrics)

    def score(
            self,
            texts: Texts,
            group_size: int,
            names: Sequence[str] | None = None) -> tuple[dict, dict]:
        """({name: (N,) float32 on the CPU}, {metric: (sum, count)}). A value is NaN where the function skipped the
        completion or was late in a worker.

        texts: a Texts, whose groups are consecutive; names: the functions to call; None: all of the run
        """
        # Another run of this process may have put its own functions into REWARDS
        register_functions(self.names, self.config.reward_file, self.functions)
        settings = vars(self.config) | (self.config.reward_settings or {})
        settings["trainer_state"] = self.state
        known = settings | self.models | {"group_size": group_size, "texts": texts}
        values = {}
        metrics = {}
        for name in names or self.names:
            began = time.perf_counter()
            if name in self.slow:  # it may run in another process, which gets neither models nor all texts
                call = arguments(name, texts, settings, self.fields)
                run = self.workers.call if self.workers else run_reward
                numbers, logged = run(call)
            else:
                call = arguments(name, texts, known, self.fields)
                numbers, logged = run_reward(call)
            self.seconds[name] = time.perf_counter() - began
            values[name] = torch.tensor(numbers)
            metrics = join([metrics, logged])
        return values, metrics

    def total(self, values: dict, group_size: int) -> torch.Tensor:
        """(N,) the weighted sum of `values`, as `score` returns them. A function of weight 0 is only measured.

        A function that skips a whole group does not apply to it. If a function skips a completion but scores others of
        the group, the completion is left out: NaN, as when all functions skip it. TRL adds up the other functions, so a
        failed call would lower the completion's reward within its group.
        """
        weighted = []
        for name, weight in zip(self.names, self.weights, strict=True):
            if weight != 0:
                weighted.append(weight * values[name])
        if not weighted:
            return torch.zeros_like(values[self.names[0]])
        stacked = torch.stack(weighted)                                              # (R, N)
        stacked = stacked.unflatten(1, (-1, group_size))                             # (R, P, G)
        skipped = stacked.isnan()
        applies = ~skipped.all(2, keepdim=True)                                      # (R, P, 1)
        skipped_alone = (skipped & applies).any(0)                                   # (P, G)
        left_out = skipped_alone | skipped.all(0)
        total = stacked.nansum(0)
        total = total.masked_fill(total.isnan(), -torch.inf)  # inf - inf is NaN, but no skip
        return total.masked_fill(left_out, torch.nan).flatten()

    def correct(self, values: dict) -> torch.Tensor:
        """(N,) float: 1 where the success reward has its highest value, else 0; NaN where the reward is not finite."""
        value = values[self.success]
        highest = REWARDS[self.success].high
        correct = value >= highest - 1e-6
        return correct.float().masked_fill(~value.isfinite(), torch.nan)

    def check(self, records: list) -> None:
        """Raises Mistake with file and line of a record that a reward cannot score."""
        self.fields = set().union(*records) - NOT_FOR_REWARDS
        for name in self.names:
            check_records(name, records)

    def close(self) -> None:
        """Ends the worker processes. The next call starts new ones."""
        if self.workers:
            self.workers.close()


def check_reward(name: str, file: str | None, models: dict) -> None:
    """Raises Mistake for a reward that is unknown or lacks its model. file: reward_file; models: {parameter: model}"""
    if name not in REWARDS:
        known = hint(name, REWARDS, load_reward_file(file))
        raise Mistake(f"reward_functions: {name!r} is no reward ({known}); correct the name or define it in "
                      f"{file or 'reward_file=FILE.py'}")
    for parameter, key in MODELS.items():
        if parameter in REWARDS[name].settings and models[parameter] is None:
            raise Mistake(f"reward {name} needs {key}; name a model, or set other reward_functions")


def hint(name: str, known: Iterable[str], more: Iterable[str] = ()) -> str:
    """The known name that is like `name` or, if there is none, all known ones. more: names that are not listed"""
    near = difflib.get_close_matches(name, [*known, *more], n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"there are {', '.join(sorted(known)) or 'none'}"


def check_settings(settings: dict, names: tuple) -> None:
    """Raises Mistake for a key that is a setting of no reward, and, for our rewards, for a value of another type than
    the default. A number must be below 10^12."""
    for key, value in settings.items():
        takers = [name for name in names if key in REWARDS[name].settings]
        if not takers:
            raise Mistake(f"reward_settings: {key!r} is not a setting (a parameter after *) of {' or '.join(names)}; "
                          "correct the name")
        is_number = isinstance(value, (int, float)) and abs(value) < 1e12
        for name in takers:
            taker = REWARDS[name]
            if not is_own_function(taker.fn):
                continue
            default = taker.parameters[key].default
            if isinstance(default, str) and not isinstance(value, str):
                kind = "a text"
            elif isinstance(default, (int, float)) and not is_number:
                kind = "a number"
            else:
                continue
            raise Mistake(f"reward_settings: {key}={shown(value)} of the reward {name} must be {kind}, as its "
                          f"default {shown(default)} is")


def success_reward(config: Settings) -> str | None:
    """The reward whose highest value means that a completion is correct; None if there is none."""
    names = config.reward_names
    without_model = [name for name in names if REWARDS[name].settings.isdisjoint(MODELS)]
    usable = [name for name in without_model if math.isfinite(REWARDS[name].high)]
    if config.success_reward is not None:
        name = config.success_reward
    elif config.reward_functions:
        name = names[0]
    else:
        name = PRESET_SUCCESS.get(config.task_type)
    if name in usable:
        return name
    if config.success_reward is not None:
        needed_by = f"success_reward={config.success_reward!r}"
    elif config.train_pass_k > 1:
        needed_by = f"train_pass_k={config.train_pass_k}"
    else:
        return None
    raise Mistake(f"{needed_by} needs a reward of this run that has a highest value "
                  f"({', '.join(usable) or 'there is none'}); set success_reward to one, or leave it out")


def main(argv: list[str]) -> None:
    """Prints the table of rewards and the presets."""
    if argv:
        raise UsageError(f"{argv[0]}: this script has no options but --help")
    import_rewards()
    for name, function in REWARDS.items():
        docstring = function.fn.__doc__ or ""  # python -OO has none
        summary = docstring.partition("\n")[0]
        print(f"{name:<18}{function.range:<16}{summary}")
    print("\npresets (task_type)")
    for name, names in PRESETS.items():
        print(f"{name:<18}{', '.join(names)}")


if __name__ == "__main__":
    run_script(main)
