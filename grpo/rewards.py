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
from grpo.reward_functions.record_checks import check_reader, check_records
from grpo.reward_functions.registry import (
    IN_PROCESS,
    REWARDS,
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
        self.names, self.weights = tuple(names), config.reward_weights or (1.0,) * len(names)
        self.success = success(config, names)
        self.config, self.judge, self.fields = config, judge, ()
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
        compared = None
        if self.config.reward_normalisation == "group":
            compared = self.total(normalised(values, G)).round(decimals=6).float().to(device).view(-1, G)
        values = {name: x.to(device) for name, x in values.items()}                  # (N,) each
        k = self.config.train_pass_k
        weight = pass_k_weight(self.right(values).view(-1, G), k) if k > 1 else None
        return Scored(self.total(values).view(-1, G), None if compared is None else compared[..., None], values, weight,
                      compared, log.metrics if self.can_log else None)

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
        found, late, log = dict(zip([call[0] for call in here], run_together(here), strict=True)), set(), Log()
        for call in calls:
            if self.in_workers(call):
                *found[call[0]], late_here = self.workers.call(*call)
                late |= late_here
        values, N = {}, calls[0][-1]
        for name in names or self.names:
            numbers, logged = found[name]
            values[name] = torch.tensor([math.nan if x is None else x for x in map(finite_or_inf, numbers)])
            log.add(logged, name)
        was_late = torch.tensor([i in late for i in range(N)], dtype=torch.bool)
        return {name: x.masked_fill(was_late, math.nan) for name, x in values.items()}, was_late, log

    def prepared(self, name, texts, group_size):
        """(name, {parameter: list of N}, {other parameter: value}, N): a call of a function."""
        known = vars(self.config) | self.models | {"group_size": group_size, "texts": texts,
                                                   "trainer_state": self.state}
        fields, settings = (plain_arguments(name, texts, known, self.fields) if REWARDS[name].plain
                            else arguments(name, texts, known))
        return name, fields, settings, len(next(iter(fields.values())) if fields else texts.tokens or texts.completions)

    def in_workers(self, call):
        name, _, settings, _ = call
        return REWARDS[name].slow and self.config.reward_workers > 0 and not IN_PROCESS & set(settings)

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
        """Raises ValueError naming file and line of the first record that a reward cannot score.

        A plain function is not called, because it need not accept empty completions: it is enough that the records
        have each field that its signature names. A judge or a reward model reads some records.
        tokenizer: the generator's; None: whether a completion of max_new_tokens fits is then not always known
        """
        self.fields = tuple(as_columns(records)[1])
        for name in self.names:
            alone = (lambda texts: self.prepared(name, texts, 1)) if REWARDS[name].plain else (
                lambda texts: check_finite(name, self.score(texts, 1, [name])[0][name]))
            check_records(name, records, alone)
        for parameter, model in self.models.items():
            if any(parameter in parameters(name) for name in self.names):
                check_reader(model, records, self.config.max_new_tokens, tokenizer)

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
            if models[parameter] is None and parameter in parameters(name) and not config.reward_functions:
                raise ValueError(f"{key} is not set, and neither is reward_functions: for prompts set those that "
                                 f"python grpo/rewards.py lists; for fill-in name a judge with --{key}=PATH")
            if models[parameter] is None and parameter in parameters(name):
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


def finite_or_inf(x):
    """A reward as a float, infinity for one that is not finite, and None for None. (NaN stands for None elsewhere.)"""
    return x if x is None else float(x) if math.isfinite(x) else math.inf


def check_finite(name, values):
    """Raises ValueError if a value of a reward is not finite."""
    if values.isinf().any():
        raise ValueError(f"reward {name} returned a number that is not finite; return None to skip a completion")


def know_rewards(path, sandbox=None):
    """Fills a worker's table: importing this module registers the built-in rewards, and the file those of the user.

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
    name = config.success_reward or (PRESET_SUCCESS.get(config.task_type) if not config.reward_functions else names[0])
    of_ids = {"completion_ids", *MODELS}  # evaluation has greedy completions as texts alone
    usable = [n for n in names if not of_ids & set(parameters(n)) and math.isfinite(REWARDS[n].high)]
    if name not in usable and config.success_reward is not None:
        found = ", ".join(usable) or "this run has none; use success_reward=None or add one with @reward(low, high)"
        raise ValueError(f"success_reward={name!r} is not one of the rewards of texts that have a highest value: "
                         f"{found}")
    if name not in usable and config.train_pass_k > 1:
        raise ValueError(f"train_pass_k={config.train_pass_k} needs a success_reward that decides what is correct")
    return name if name in usable else None


def normalised(values, G):
    """Each reward minus its mean within the group, divided by its standard deviation there plus 1e-4, so that the range
    of a reward does not decide how much it counts (arXiv 2601.05242). values: {name: (N,)}, NaN where skipped, which
    stays NaN and counts in neither. In float64, because the sum of rewards that cancel must be 0."""
    out = {}
    for name, x in values.items():
        x = x.double().view(-1, G)                                                   # (P, G)
        count = (~x.isnan()).sum(1, keepdim=True)                                    # (P, 1)
        apart = x - x.nansum(1, keepdim=True) / count.clamp(min=1)
        std = (apart.square().nansum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        out[name] = (apart / (std + 1e-4)).flatten()
    return out


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
