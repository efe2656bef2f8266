"""The rewards of a run: named functions, each with a weight, whose values are added.

python grpo/rewards.py                           lists them with their ranges, and the presets
python grpo/rewards.py --reward_file=FILE        ... with those that a file of yours defines with @reward
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import inspect
import math
import multiprocessing
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from core.config import UsageError, run_config_file, run_script
from core.prompts import as_columns
from grpo.reward_functions import text, verify_math, verify_code, judge  # noqa: F401: they register the rewards
from grpo.reward_functions.registry import IN_PROCESS, REWARDS, arguments, parameters, reward, run_reward

__all__ = ["PRESETS", "REWARDS", "Rewards", "Scored", "reward"]
PRESETS = {"fill_in": ("judge",), "math": ("math_format", "math_answer", "math_number"),
           "code": ("code_correctness", "length_penalty"), "general": ("length_penalty",),
           "reasoning": ("math_format", "length_penalty")}
PRESET_SUCCESS = {"math": "math_answer", "reasoning": "math_format"}  # the reward that decides what is correct


@dataclass
class Scored:
    """The rewards of N = P * G completions.

    Scored(reward) is enough: the other fields have defaults.
    """
    reward: torch.Tensor                         # (P, G) NaN where a completion is not scored
    credit: torch.Tensor | None = None           # (P, G, 1 or M) reward of each completion, or of each sampled token
    values: dict = field(default_factory=dict)   # {name of a reward: (N,)}
    weight: torch.Tensor | None = None           # (P, G) factor on the advantage of each completion

    def __post_init__(self):
        self.credit = self.reward[..., None] if self.credit is None else self.credit
        self.weight = torch.ones_like(self.reward) if self.weight is None else self.weight

    def select(self, useful):
        """The problems for which useful (P,) is True, without their values."""
        return Scored(self.reward[useful], self.credit[useful], weight=self.weight[useful])

    @classmethod
    def join(cls, parts):
        """Several as one, without their values. Credit of tokens is padded with zeros on the right to the longest."""
        parts = [part for part in parts if len(part.reward)] or parts[:1]
        longest = max(part.credit.shape[2] for part in parts)
        credit = torch.cat([F.pad(part.credit, (0, longest - part.credit.shape[2])) for part in parts])
        reward, weight = (torch.cat([getattr(part, name) for part in parts]) for name in ("reward", "weight"))
        return cls(reward, credit, weight=weight)


class Rewards:
    """The rewards of a run, called with rollouts. Returns Scored:

    reward: the weighted sum of the functions that did not skip a completion; NaN where all did, or one was late
    credit: the same, or with config.credit_window=W the judge's log-odds within W positions of each token
    weight: ones, or with config.train_pass_k=k the factors that turn the advantage into one of pass@k
    values: NaN where a function skipped a completion

    judge: a Judge, or None if no reward needs it
    """

    def __init__(self, config, judge=None):
        load_reward_file(config.reward_file)
        names = config.reward_functions or PRESETS[config.task_type]
        for name in names:
            if name not in REWARDS:
                raise ValueError(f"reward_functions: {name!r} is not one of {', '.join(sorted(REWARDS))}; "
                                 "define your own in reward_file")
            if judge is None and "judge_model" in parameters(name):
                raise ValueError(f"judge_checkpoint is not set, but reward {name} is asked for; name a checkpoint in "
                                 "the config or with --judge_checkpoint=FILE")
        if config.reward_weights and len(config.reward_weights) != len(names):
            raise ValueError(f"reward_weights={config.reward_weights} must be as many as the rewards: "
                             f"{', '.join(names)}")
        if config.credit_window is not None and tuple(names) != ("judge",):
            raise ValueError(f"credit_window={config.credit_window} divides the judge's score among tokens and works "
                             "with that reward alone; use credit_window=None with other rewards")
        self.names, self.weights = tuple(names), config.reward_weights or (1.0,) * len(names)
        self.success = success(config, names)
        self.config, self.judge, self.pool = config, judge, None

    @torch.no_grad()
    def __call__(self, rollouts):
        device, G = rollouts.target.device, rollouts.group_size
        if self.config.credit_window is not None:
            score, credit = self.judge.score_and_credit(rollouts.texts, self.config.credit_window)
            return Scored(score.view(-1, G), credit.view(-1, G, credit.shape[1]), {"judge": score})
        values, _ = self.score(rollouts.texts, G)
        values = {name: x.to(device) for name, x in values.items()}                  # (N,) each
        k = self.config.train_pass_k
        weight = pass_k_weight(self.right(values).view(-1, G), k) if k > 1 else None
        return Scored(self.total(values).view(-1, G), values=values, weight=weight)

    def score(self, texts, group_size, names=None):
        """({name: (N,) float32 on the CPU, NaN where the function skipped}, (N,) bool: the completion was late).

        A completion is late if a worker did not finish it before reward_timeout. Every function then skips it.
        texts: has what the run's rewards ask for: prompts, completions (lists of N), columns, tokens; the group_size
        completions of a problem are consecutive
        names: the functions to call, at least one; None: all of the run
        """
        values, late = {}, set()
        for name in names or self.names:
            numbers, late_here = self.call(name, texts, group_size)
            values[name] = torch.tensor([math.nan if x is None else float(x) for x in numbers])
            late |= late_here
        was_late = torch.tensor([i in late for i in range(len(numbers))], dtype=torch.bool)
        return {name: x.masked_fill(was_late, math.nan) for name, x in values.items()}, was_late

    def total(self, values):
        """(N,) the weighted sum of `values`, as score returns them; NaN where every function skipped."""
        stacked = torch.stack([w * values[n] for n, w in zip(self.names, self.weights, strict=True)])
        return stacked.nansum(0).masked_fill(stacked.isnan().all(0), torch.nan)

    def right(self, values):
        """(N,) float: 1 where the success reward has its highest value, else 0; NaN where it skipped the completion."""
        x = values[self.success]
        return (x >= REWARDS[self.success].high - 1e-6).float().masked_fill(x.isnan(), torch.nan)

    def check(self, records):
        """Raises ValueError naming file and line of the first record that a reward cannot score.

        A function's own check sees every record. Without one, the function is called with empty completions: on all
        records, or, if it is slow, on one record of each set of fields.
        """
        columns = as_columns(records)[1]
        for name in self.names:
            if check := REWARDS[name].check:
                for i, record in enumerate(records):
                    named(record, check, **{key: x[i] for key, x in columns.items()})
            elif not IN_PROCESS & set(parameters(name)):
                self.check_calls(name, one_of_each_kind(records) if REWARDS[name].slow else records)

    def check_calls(self, name, records):
        """Calls a function with empty completions of the records; on an error, searches for the record."""
        def call(part):
            prompts, columns = as_columns(part)
            texts = SimpleNamespace(prompts=prompts, completions=[""] * len(part), columns=columns, tokens=None)
            self.call(name, texts, group_size=1)

        def fails(count):
            try:
                call(records[:count])
            except ValueError:
                return True
            return False

        try:
            call(records)
        except ValueError:
            low, high = 0, len(records)  # the first `low` records pass, the first `high` fail
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fails(middle) else (middle, high)
            named(records[low], call, [records[low]])
            raise

    def call(self, name, texts, group_size):
        """(values of one function: one float or None for each completion, indices of the late completions)"""
        known = vars(self.config) | {"group_size": group_size, "texts": texts, "judge_model": self.judge}
        fields, settings = arguments(name, texts, known)
        N, late = len(next(iter(fields.values())) if fields else texts.tokens or texts.completions), set()
        if REWARDS[name].slow and self.config.reward_workers and not IN_PROCESS & set(settings):
            values, late = self.call_in_pool(name, fields, settings, N)
        else:
            values = run_reward(name, fields, settings, N)
        for i, x in enumerate(values):
            if x is not None and not math.isfinite(x):
                raise ValueError(f"reward {name} returned {x} for completion {texts.completions[i][:60]!r}; return "
                                 "None to skip a completion")
        return values, late

    def call_in_pool(self, name, fields, settings, N):
        """(values, indices of the late completions) of a slow function, called in worker processes.

        Each completion (or with whole_group all of them) is one job. Jobs that are not done after reward_timeout
        seconds are late: their values are None, and the workers are ended. A ValueError of a job is raised here.
        """
        workers, late, values = self.config.reward_workers, set(), []
        self.pool = self.pool or start_pool(workers, self.config.reward_file)
        cuts = [slice(0, N)] if REWARDS[name].whole_group else [slice(i, i + 1) for i in range(N)]
        jobs = [self.pool.apply_async(run_reward, (name, {key: x[cut] for key, x in fields.items()}, settings,
                                                   cut.stop - cut.start)) for cut in cuts]
        deadline = time.monotonic() + self.config.reward_timeout
        for cut, job in zip(cuts, jobs, strict=True):
            try:
                values += job.get(max(0.0, deadline - time.monotonic()))
            except ValueError as error:  # without the worker's traceback, which multiprocessing puts into its cause
                raise ValueError(str(error)) from None
            except multiprocessing.TimeoutError:
                late |= set(range(cut.start, cut.stop))
                values += [None] * (cut.stop - cut.start)
        if late:
            self.close()
        return values, late

    def close(self):
        """Ends the worker processes; the next call starts new ones."""
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()
            self.pool = None


def start_pool(workers, reward_file):
    """Worker processes that know the rewards; returns when all have started, which is no part of a job's time."""
    spawn = multiprocessing.get_context("spawn")
    started = spawn.Semaphore(0)
    pool = spawn.Pool(workers, start_worker, (reward_file, started))
    for _ in range(workers):
        started.acquire()
    return pool


def start_worker(reward_file, started):
    load_reward_file(reward_file)
    started.release()


def load_reward_file(path):
    """Runs a Python file, whose @reward functions are then in REWARDS; None does nothing."""
    if path is None:
        return
    if not os.path.isfile(path):
        raise FileNotFoundError(f"reward_file={path} does not exist")
    run_config_file(path)


def one_of_each_kind(records):
    """The first record of each set of fields that have a value."""
    first = {}
    for record in records:
        first.setdefault(frozenset(key for key, x in record.items() if x is not None), record)
    return list(first.values())


def named(record, function, /, *arguments, **fields):
    """Calls a function; a ValueError then begins with the file and the line of the record."""
    try:
        function(*arguments, **fields)
    except ValueError as error:
        raise ValueError(f"{record['where']}: {error}") from None


def success(config, names):
    """The reward whose highest value means that a completion is correct; None if there is none."""
    name = config.success_reward or (PRESET_SUCCESS.get(config.task_type) if not config.reward_functions else names[0])
    usable = [n for n in names if "judge_model" not in parameters(n) and math.isfinite(REWARDS[n].high)]
    if name not in usable and config.success_reward is not None:
        raise ValueError(f"success_reward={name!r} is not one of the rewards that have a highest value: "
                         f"{', '.join(usable)}")
    if name not in usable and config.train_pass_k > 1:
        raise ValueError(f"train_pass_k={config.train_pass_k} needs a success_reward that decides what is correct")
    return name if name in usable else None


def pass_k_weight(right, k):
    """The factor on each leave-one-out advantage that makes its expected gradient the one of pass@k.

    right: (P, G) 1 right, 0 wrong, NaN neither. Returns (P, G): k times the chance that k - 1 other completions of the
    group, drawn without replacement from those that are right or wrong, are all wrong (arXiv 2508.10751, without the
    completion itself). With fewer than k - 1 such others the chance cannot be estimated, and the factor is 1.
    """
    scored = (~right.isnan()).float()                                                # (P, G)
    wrong = (right == 0).float()                                                     # (P, G)
    others = scored.sum(1, keepdim=True) - scored                                    # (P, G) without the completion
    wrong_others = wrong.sum(1, keepdim=True) - wrong                                # (P, G)
    weight = torch.full_like(others, float(k))
    for j in range(k - 1):
        weight = weight * (wrong_others - j).clamp(min=0) / (others - j).clamp(min=1)
    return torch.where(others < k - 1, 1.0, weight)


def main(argv):
    """Prints the table of rewards and the presets."""
    for argument in argv:
        if not argument.startswith("--reward_file="):
            raise UsageError(f"{argument}: the one option is --reward_file=FILE")
        load_reward_file(argument.partition("=")[2])
    for name, r in REWARDS.items():
        print(f"{name:<18}[{r.low:g}, {r.high:g}]".ljust(34) + (inspect.getdoc(r.fn) or "").split("\n")[0])
    print("\npresets (task_type)")
    for name, names in PRESETS.items():
        print(f"{name:<18}{', '.join(names)}")


if __name__ == "__main__":
    run_script(main)
