"""What a completion is worth: named reward functions, weighted and added; a judge is one of them.

python grpo/rewards.py                           lists them with their ranges, and the presets
python grpo/rewards.py --reward_file=FILE        ... with those that a file of yours defines with @reward
"""

import inspect
import math
import multiprocessing
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.config import UsageError, run_config_file, run_script
from core.judge import calculate_judge_scores, calculate_realness
from grpo.verifiers import REWARDS

PRESETS = {"fill_in": ("judge",), "math": ("math_format", "math_answer", "math_number"),
           "code": ("code_correctness", "length_penalty"), "general": ("length_penalty",),
           "reasoning": ("math_format", "length_penalty")}
PRESET_SUCCESS = {"math": "math_answer", "reasoning": "math_format"}  # what being right means


def load_reward_file(path):
    """Runs a file whose @reward functions then stand in REWARDS."""
    if path is not None:
        run_config_file(path)


def run_reward(name, arguments):
    """Calls a reward by name: what a worker process is asked to do."""
    return REWARDS[name].fn(**arguments)


class Rewards:
    """The rewards of a run. Called with rollouts it returns

    reward: (P, G), the weighted sum of the functions that did not skip; NaN where all did
    credit: (P, G, 1), the same, or with train_pass_k what it adds to pass@k; with config.credit_window=W (P, G, M), the
            mean over the positions within W of a token of the judge's log-odds that the text there is true
    values: {name: (N,)}, NaN where a function skipped
    """

    def __init__(self, config, judge=None, judge_tokenizer=None):
        load_reward_file(config.reward_file)
        names = config.reward_functions or PRESETS[config.task_type]
        for name in names:
            if name not in REWARDS:
                raise ValueError(f"reward_functions: {name!r} is not one of {', '.join(sorted(REWARDS))}; "
                                 "define your own in reward_file")
        if config.reward_weights and len(config.reward_weights) != len(names):
            raise ValueError(f"reward_weights={config.reward_weights} must be as many as the rewards: "
                             f"{', '.join(names)}")
        if "judge" in names and judge is None:
            raise ValueError("judge_checkpoint is not set, but reward judge is asked for; name a checkpoint in the "
                             "config or with --judge_checkpoint=FILE")
        if config.credit_window is not None and tuple(names) != ("judge",):
            raise ValueError(f"credit_window={config.credit_window} spreads the judge's score alone; use "
                             "credit_window=None with other rewards")
        self.names, self.weights = tuple(names), config.reward_weights or (1.0,) * len(names)
        self.success = success(config, names)
        self.config, self.judge, self.judge_tokenizer = config, judge, judge_tokenizer
        self.pool, self.late = None, set()

    def check(self, records):
        """Raises ValueError naming file and line if a record lacks a field that a reward needs."""
        checked = set()
        for record in records:
            if (fields := frozenset(key for key, value in record.items() if value is not None)) not in checked:
                checked.add(fields)
                for name in set(self.names) - {"judge"}:
                    try:
                        prompts, columns = as_columns([record])
                        self.call(name, prompts, [""], columns, group_size=1)
                    except ValueError as error:
                        raise ValueError(f"{record['where']}: {error}") from None

    @torch.no_grad()
    def __call__(self, rollouts):
        device, P = rollouts.target.device, rollouts.problems
        if self.config.credit_window is not None:
            realness = calculate_realness(self.judge, rollouts.tokens)               # (N, T)
            odds = realness.clamp(1e-3, 1 - 1e-3).logit()
            near = windowed_mean(odds, self.config.credit_window)                    # (N, T)
            near = near.gather(1, rollouts.place)
            score = realness.mean(1)
            return score.view(P, -1), near.view(P, -1, near.shape[1]), {"judge": score}
        self.late = set()                                                            # completions a pool did not finish
        values = {name: self.values(name, rollouts) for name in self.names}          # (N,) each, NaN where skipped
        stacked = torch.stack([w * values[n] for n, w in zip(self.names, self.weights, strict=True)])
        skipped = stacked.isnan().all(0)
        skipped[list(self.late)] = True
        total = stacked.nansum(0).masked_fill(skipped, torch.nan).view(P, -1).to(device)
        credit = total
        if self.config.train_pass_k > 1:
            credit = total * pass_k_weight(self.right(values).view(P, -1), self.config.train_pass_k)
        return total, credit[..., None], values

    def right(self, values):
        """(N,) bool: which completions get the most that the success reward can give; a skipped one is not right."""
        return values[self.success] >= REWARDS[self.success].high - 1e-6

    def values(self, name, rollouts):
        """(N,) float32 rewards of one function, NaN where it skips."""
        if name == "judge" and rollouts.tokens is not None:
            return calculate_judge_scores(self.judge, rollouts.tokens, self.judge_tokenizer.cls_token_id)
        prompts, completions, columns = rollouts.texts()
        values = self.of_texts(name, prompts, columns, completions, len(completions) // rollouts.problems)
        return values.to(rollouts.target.device)

    def of_texts(self, name, prompts, columns, completions, group_size):
        """(N,) float32 rewards of texts by one function, NaN where it skips; a group's completions stand together."""
        if name == "judge":
            return judge_texts(self.judge, self.judge_tokenizer, prompts, completions)
        values = self.call(name, prompts, completions, columns, group_size)
        return torch.tensor([math.nan if x is None else float(x) for x in values])

    def call(self, name, prompts, completions, columns, group_size):
        """The checked values of a function of text, one float or None per completion."""
        function = REWARDS[name]
        known = vars(self.config) | {"group_size": group_size}
        settings = {key: known[key] for key, p in inspect.signature(function.fn).parameters.items()
                    if p.kind is p.KEYWORD_ONLY and key in known}
        arguments = {"prompts": prompts, "completions": completions, **columns}
        if function.slow and self.config.reward_workers:
            values = self.in_pool(name, arguments, settings)
        else:
            values = function.fn(**arguments, **settings)
        if len(values) != len(completions):
            raise ValueError(f"reward {name} returned {len(values)} values for {len(completions)} completions")
        for i, x in enumerate(values):
            if x is not None and not math.isfinite(x):
                raise ValueError(f"reward {name} returned {x} for completion {completions[i][:60]!r}; return None to "
                                 "skip a sample")
        return values

    def in_pool(self, name, arguments, settings):
        """Calls a slow function in worker processes, a completion at a time. At the deadline (reward_timeout) they are
        killed, and what they had not finished is skipped, whatever other rewards say about it."""
        N, shares = len(arguments["completions"]), self.config.reward_workers
        if self.pool is None:
            self.pool = multiprocessing.get_context("spawn").Pool(shares, load_reward_file, (self.config.reward_file,))
            self.pool.map(abs, range(shares))  # starting them takes time that is not the reward's
        cuts = [slice(0, N)] if REWARDS[name].whole_group else [slice(i, i + 1) for i in range(N)]
        jobs = [self.pool.apply_async(run_reward, (name, {k: x[cut] for k, x in arguments.items()} | settings))
                for cut in cuts]
        values, deadline = [], time.monotonic() + self.config.reward_timeout
        for cut, job in zip(cuts, jobs, strict=True):
            try:
                values += job.get(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                self.late |= set(range(cut.start, cut.stop))
                values += [None] * (cut.stop - cut.start)
        if self.late:
            self.close()
        return values

    def close(self):
        """Ends the worker processes; the next call starts new ones."""
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()
            self.pool = None


def success(config, names):
    """The reward whose highest value means that a completion is right; None if no reward says so."""
    name = config.success_reward or (PRESET_SUCCESS.get(config.task_type) if not config.reward_functions else names[0])
    known = name in names and name != "judge" and math.isfinite(REWARDS[name].high)
    if not known and config.success_reward is not None:
        raise ValueError(f"success_reward={name!r} is not one of the rewards that have a highest value: "
                         f"{', '.join(n for n in names if n != 'judge' and math.isfinite(REWARDS[n].high))}")
    if not known and config.train_pass_k > 1:
        raise ValueError(f"train_pass_k={config.train_pass_k} needs a success_reward that says what is right")
    return name if known else None


def as_columns(records):
    """(rendered prompts, {field: values}) of records of PromptConsumer: what rewards are called with."""
    fields = {field for record in records for field in record} - {"prompt", "text", "tokens", "where", "split"}
    return [r["text"] for r in records], {field: [r.get(field) for r in records] for field in fields}


def judge_texts(model, tokenizer, prompts, completions):
    """The judge's score of texts of different lengths, those of one length at a time: no padding, no change. (N,)"""
    texts = [tokenizer.encode(p + c) or [tokenizer.pad_token_id] for p, c in zip(prompts, completions, strict=True)]
    room, longest = model.config.block_size - (model.config.judge_head == "cls"), max(map(len, texts))
    if longest > room:
        raise ValueError(f"judge_checkpoint reads {room} tokens, but a prompt with its completion has {longest}: lower "
                         "max_new_tokens or max_prompt_length, or take a judge with a larger block_size")
    device, scores = next(model.parameters()).device, torch.zeros(len(texts))
    for length in {len(ids) for ids in texts}:
        rows = [i for i, ids in enumerate(texts) if len(ids) == length]
        batch = torch.tensor([texts[i] for i in rows], device=device)
        scores[rows] = calculate_judge_scores(model, batch, tokenizer.cls_token_id).float().cpu()
    return scores


def pass_k_weight(right, k):
    """How much a right completion adds to the chance that k completions of its group hold a right one.

    right: (P, G) bool. Returns (P, 1): k times the chance that k - 1 others of a right one are all wrong, the factor
    between the gradients of pass@k and of pass@1 (arXiv 2508.10751). 1 for k = 1; 0 where nearly all are right.
    """
    G, wrong = right.shape[1], (~right).sum(1).float()                               # (P,)
    weight = torch.full_like(wrong, float(k))
    for j in range(k - 1):
        weight = weight * (wrong - j).clamp(min=0) / (G - 1 - j)
    return torch.where(wrong == G, float(k), weight)[:, None]


def windowed_mean(x, width):
    """Mean of x (N, T) over the positions at most `width` away, those inside the text. Returns (N, T)."""
    T = x.shape[1]
    total = torch.cat((torch.zeros_like(x[:, :1]), x.cumsum(1)), dim=1)              # (N, T + 1)
    place = torch.arange(T, device=x.device)
    low, high = (place - width).clamp(min=0), (place + width + 1).clamp(max=T)       # (T,)
    return (total[:, high] - total[:, low]) / (high - low)


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
