"""The rewards of a run: named functions, each with a weight, whose values are added.

python grpo/rewards.py                           lists them with their ranges, and the presets
python grpo/rewards.py --reward_file=FILE        ... with those of a file of yours
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import difflib
import inspect
import math

import torch

from core.config import UsageError
from core.prompts import as_columns
from core.settings.script import run_script
from grpo.reward_functions import judge, reward_model, text, verify_code, verify_math  # noqa: F401: they register
from grpo.reward_functions.groups import normalised, pass_k_weight
from grpo.reward_functions.record_checks import check_reader, check_records
from grpo.reward_functions.registry import (
    IN_PROCESS,
    REWARDS,
    Call,
    Log,
    arguments,
    gets,
    load_reward_file,
    parameters,
    reward,
    run_together,
)
from grpo.reward_functions.settings import PRESET_SUCCESS, PRESETS
from grpo.reward_functions.trl import TrainerState, plain_arguments, register_functions
from grpo.reward_functions.workers import Workers
from grpo.rollout import Scored
from grpo.sandbox.run import found_here, take_over

__all__ = ["PRESETS", "REWARDS", "Rewards", "Scored", "reward"]
MODELS = {"judge_model": "judge_checkpoint", "reward_scorer": "reward_model_checkpoint"}  # {parameter: setting}


class Rewards:
    """The rewards of a run, called with rollouts. Returns Scored:

    reward: the weighted sum of the functions that did not skip a completion; NaN where all did, or one was late
    credit: the same, with config.reward_normalisation="group" of the normalised values; or with config.credit_window=W
            the judge's log-odds within W positions of each token
    weight: ones, or with config.train_pass_k=k the factors that turn the advantage into one of pass@k
    values: NaN where a function skipped a completion

    judge: a Judge, reward_scorer: a RewardModel, or None if no reward needs it
    state: what rewards may know about the run; the trainer counts its steps in state.global_step
    """

    def __init__(self, config, judge=None, reward_scorer=None):
        names = config.reward_functions or PRESETS[config.task_type]
        register_functions(names, load_reward_file(config.reward_file), config.reward_file)
        self.models = {"judge_model": judge, "reward_scorer": reward_scorer}
        check_settings(config, names, self.models)
        self.config, self.judge = config, judge
        self.names = tuple(names)
        self.weights = config.reward_weights or (1.0,) * len(names)
        self.success = success(config, names)
        self.fields = ()  # of the records, once `check` has seen them
        self.can_log = any(gets(name, key) for name in names for key in ("log_metric", "log_extra"))
        self.state = TrainerState(0, config.max_iters, config.log_interval, config.eval_interval, config.save_interval)
        path = config.reward_file and os.path.abspath(config.reward_file)  # a reward may change the working folder
        sandbox = found_here() if any("sandbox" in parameters(name) for name in names) else None
        self.workers = Workers(config.reward_workers, config.reward_timeout, know_rewards, path, sandbox)

    @torch.no_grad()
    def __call__(self, rollouts):
        device, G = rollouts.target.device, rollouts.group_size
        if self.config.credit_window is not None:
            score, credit = self.judge.score_and_credit(rollouts.texts, self.config.credit_window)
            score = score.masked_fill(score.isnan(), torch.inf)  # not finite; NaN would mean that it was skipped
            return Scored(score.view(-1, G), credit.view(-1, G, credit.shape[1]), {"judge": score})
        values, _, log = self.score(rollouts.texts, G)
        credit = weight = None
        if self.config.reward_normalisation == "group":
            credit = self.total(normalised(values, G)).round(decimals=6).float().to(device).view(-1, G, 1)
        values = {name: x.to(device) for name, x in values.items()}                  # (N,) each
        if self.config.train_pass_k > 1:
            weight = pass_k_weight(self.right(values).view(-1, G), self.config.train_pass_k)
        metrics = log.metrics if self.can_log else None
        return Scored(self.total(values).view(-1, G), credit, values, weight, metrics)

    def score(self, texts, group_size, names=None):
        """({name: (N,) float32 on the CPU}, (N,) bool: the completion was late, Log). A value is NaN where the function
        skipped the completion, and infinity where it returned what is not finite.

        A completion is late if a worker did not finish it before reward_timeout. Every function then skips it.
        texts: has what the run's rewards ask for: prompts, completions (lists of N), columns, tokens, completion_ids;
        the group_size completions of a problem are consecutive
        names: the functions to call, at least one; None: all of the run
        """
        calls = [self.prepared(name, texts, group_size) for name in names or self.names]
        here = [call for call in calls if not self.in_workers(call)]
        found = dict(zip([call.name for call in here], run_together(here), strict=True))
        late = torch.zeros(calls[0].N, dtype=torch.bool)
        for call in calls:
            if self.in_workers(call):
                numbers, log, late_here = self.workers.call(*call)
                found[call.name] = numbers, log
                late[list(late_here)] = True
        values, joined = {}, Log()
        for call in calls:
            numbers, log = found[call.name]
            joined.add(log, call.name)
            values[call.name] = torch.tensor([nan_or_inf(x) for x in numbers]).masked_fill(late, math.nan)
        return values, late, joined

    def prepared(self, name, texts, group_size):
        """The Call of a function."""
        known = vars(self.config) | self.models | {"group_size": group_size, "texts": texts,
                                                   "trainer_state": self.state}
        if REWARDS[name].plain:
            fields, settings = plain_arguments(name, texts, known, self.fields)
        else:
            fields, settings = arguments(name, texts, known)
        one_each = next(iter(fields.values())) if fields else texts.tokens or texts.completions
        return Call(name, fields, settings, len(one_each))

    def in_workers(self, call):
        """Whether a call runs in the worker processes."""
        return REWARDS[call.name].slow and self.config.reward_workers > 0 and not IN_PROCESS & set(call.settings)

    def total(self, values):
        """(N,) the weighted sum of `values`, as score returns them; NaN where every function skipped."""
        stacked = torch.stack([w * values[n] for n, w in zip(self.names, self.weights, strict=True)])
        return stacked.nansum(0).masked_fill(stacked.isnan().all(0), torch.nan)

    def right(self, values):
        """(N,) float: 1 where the success reward has its highest value, else 0; NaN where it skipped the completion, or
        is not finite."""
        x = values[self.success]
        return (x >= REWARDS[self.success].high - 1e-6).float().masked_fill(~x.isfinite(), torch.nan)

    def check(self, records, tokenizer=None):
        """Raises ValueError naming file and line of the first record that a reward cannot score. A judge or a reward
        model reads some records.

        tokenizer: the generator's; None: whether a completion of max_new_tokens fits is then not always known
        """
        self.fields = tuple(as_columns(records)[1])
        for name in self.names:
            check_records(name, records, self.check_texts)
        for parameter, model in self.models.items():
            if any(parameter in parameters(name) for name in self.names):
                check_reader(model, records, self.config.max_new_tokens, tokenizer)

    def check_texts(self, name, texts):
        """Raises ValueError if a reward cannot score these texts, whose completions are empty. A plain function is not
        called, because it need not accept empty completions: it is enough that its fields are there."""
        if REWARDS[name].plain:
            self.prepared(name, texts, 1)
        elif self.score(texts, 1, [name])[0][name].isinf().any():
            raise ValueError(f"reward {name} returned a number that is not finite; return None to skip a completion")

    def close(self):
        """Ends the worker processes; the next call starts new ones."""
        self.workers.close()


def check_settings(config, names, models):
    """Raises ValueError if a reward is not known, or settings do not fit each other. models: {parameter: model}"""
    for name in names:
        if name not in REWARDS:
            near = difflib.get_close_matches(name, REWARDS, n=1)
            remedy = f"did you mean {near[0]}?" if near else "define your own in reward_file"
            raise ValueError(f"reward_functions: {name!r} is not one of {', '.join(sorted(REWARDS))}; {remedy}")
        for parameter, key in MODELS.items():
            if models[parameter] is not None or parameter not in parameters(name):
                continue
            if not config.reward_functions:
                raise ValueError(f"{key} is not set, and neither is reward_functions: for prompts set those that "
                                 f"python grpo/rewards.py lists; for fill-in name a judge with --{key}=PATH")
            raise ValueError(f"{key} is not set, but reward {name} is asked for; name a model in the config or "
                             f"with --{key}=PATH")
    if config.reward_weights and len(config.reward_weights) != len(names):
        raise ValueError(f"reward_weights={config.reward_weights} must be as many as the rewards: {', '.join(names)}")
    if config.credit_window is not None and tuple(names) != ("judge",):
        raise ValueError(f"credit_window={config.credit_window} divides the judge's score among tokens and works "
                         "with that reward alone; use credit_window=None with other rewards")
    for key, off in (("credit_window", None), ("train_pass_k", 1)):
        if config.reward_normalisation != "none" and getattr(config, key) != off:
            raise ValueError(f"reward_normalisation={config.reward_normalisation!r} changes the rewards that {key}="
                             f"{getattr(config, key)} is made for; set reward_normalisation='none' or {key}={off}")


def nan_or_inf(x):
    """A value of a reward as a number: NaN for None, which skips the completion, and infinity for what is not finite,
    so that the step is skipped and counted."""
    if x is None:
        return math.nan
    return x if math.isfinite(x) else math.inf


def know_rewards(path, sandbox=None):
    """Fills a worker's table: importing this module registers the built-in rewards, the file those of the user.

    sandbox: found_here() of the main process, if a reward runs code
    """
    load_reward_file(path)
    if sandbox is not None:
        take_over(*sandbox)


def is_reward(fn):
    """Whether a function of a reward_file looks like a reward and no helper: it reads completions."""
    return inspect.isfunction(fn) and bool({"completions", "completion_ids"} & set(inspect.signature(fn).parameters))


def success(config, names):
    """The reward whose highest value means that a completion is correct; None if there is none."""
    of_ids = {"completion_ids", *MODELS}  # evaluation has greedy completions as texts alone
    usable = [n for n in names if not of_ids & set(parameters(n)) and math.isfinite(REWARDS[n].high)]
    if config.success_reward is not None:
        if config.success_reward not in usable:
            known = ", ".join(usable) or "this run has none; use success_reward=None or add one with @reward(low, high)"
            raise ValueError(f"success_reward={config.success_reward!r} is not one of the rewards of texts that have a "
                             f"highest value: {known}")
        return config.success_reward
    name = names[0] if config.reward_functions else PRESET_SUCCESS.get(config.task_type)
    if name in usable:
        return name
    if config.train_pass_k > 1:
        raise ValueError(f"train_pass_k={config.train_pass_k} needs a success_reward that decides what is correct")
    return None


def main(argv):
    """Prints the table of rewards and the presets."""
    for argument in argv:
        path = argument.removeprefix("--reward_file=")
        if path == argument:
            raise UsageError(f"{argument}: the one option is --reward_file=FILE")
        functions = load_reward_file(path)
        register_functions([name for name, fn in functions.items() if is_reward(fn)], functions, path)
    for name, r in REWARDS.items():
        print(f"{name:<18}[{r.low:g}, {r.high:g}]".ljust(34) + (inspect.getdoc(r.fn) or "").split("\n")[0])
    print("\npresets (task_type)")
    for name, names in PRESETS.items():
        print(f"{name:<18}{', '.join(names)}")


if __name__ == "__main__":
    run_script(main)
