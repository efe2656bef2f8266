"""One step of a run, taken to be examined: what was sampled and scored, the gradient, the memory and the time."""

import re
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from core.run.memory import memory_in_use, memory_limit
from core.scheduler import CosineLRScheduler
from core.training_step import build_optimizers, set_learning_rate
from grpo.evaluation.memory import memory_estimate
from grpo.grpo_training_step import Timer, collect_experience, sampler_of, train_on_experience

FEW = 4              # problems of the step, unless the run's own step is cheap
CHEAP_SECONDS = 15.0  # a step, or an evaluation, that is expected to take less is done whole
OUTSIDE = {"embed": "the embedding", "norm": "the last normalization", "head": "the output layer"}  # of our models


@dataclass
class Memory:
    """Megabytes; None where the system does not tell."""
    highest: float | None  # that this process has needed so far
    needed: float          # expected where all completions are as long as they may be
    limit: float | None    # that this process can have


@dataclass
class Examination:
    """What the checks read. Seconds are those of the run's own steps and evaluations."""
    config: object
    models: object             # policy, reference, judge, gold_judge (grpo/build.py: Models)
    rewards: object
    data: object
    problems: dict             # those of the step, as the policy samples for them
    sampled: list              # [(Rollouts with their texts, Scored)] of the step, and of a few other problems
    trained: object            # the Rollouts that the loss read, with advantage and train_mask
    metrics: dict              # of the step (docs/metrics.md)
    gradient: dict             # {part of the model: norm}, before clipping; empty if the step changed nothing
    memory: Memory
    step_seconds: float
    evaluation_seconds: float
    float32: bool              # the precision of the models' matrix products; else bfloat16


class Watch:
    """In the list of optimizers: notes the norm of the gradient of each part of the model, and moves nothing."""

    def __init__(self, model):
        self.model, self.param_groups, self.norms = model, [], {}

    @torch.no_grad()
    def step(self):
        adapter = any("lora_" in name for name, _ in self.model.named_parameters())
        squares = {}
        for name, p in self.model.named_parameters():
            if p.requires_grad or not adapter:
                square = 0.0 if p.grad is None else p.grad.float().square().sum()
                squares[part_of(name)] = squares.get(part_of(name), 0.0) + square
        self.norms = {part: float(square) ** 0.5 for part, square in squares.items()}

    def zero_grad(self, set_to_none):
        """The optimizers after this one clear the gradient."""


class Listener:
    """Rewards that keep what they were asked."""

    def __init__(self, rewards):
        self.rewards, self.heard = rewards, []

    def __call__(self, rollouts):
        self.heard.append((rollouts, self.rewards(rollouts)))
        return self.heard[-1][1]


def part_of(name):
    """The part of a model that a parameter belongs to: its layer, or the module outside the layers."""
    layer = re.search(r"\.(\d+)\.", name)
    module = re.sub(r"\.(weight|bias)$", "", name).split(".")[-1]
    return f"layer {layer[1]}" if layer else OUTSIDE.get(module, module)


def examine(config, models, rewards, data, evaluation, dist):
    """An Examination of one optimizer step of a run, which starts and ends here: nothing is written.

    The step is the run's own if that is cheap and fits into memory, and else one on FEW problems.
    Raises ValueError if not even that fits.
    """
    if dist.world > 1:
        raise ValueError(f"doctor=True examines a step in one process, not in {dist.world}: start it without torchrun")
    if dist.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(dist.device)
    before, limit = memory_in_use(dist.device), memory_limit(dist.device)
    once = replace(config, ppo_epochs=1, minibatches=1)
    few = replace(once, batch_size=min(FEW, config.batch_size), gradient_accumulation_steps=1)
    needed, needed_by_few = ((before or 0.0) + beside_weights(c, models, data, dist) for c in (once, few))
    if limit is not None and needed_by_few > limit:
        raise ValueError(f"a step on {few.batch_size} problems needs about {needed_by_few:.0f} MB, but {dist.device} "
                         f"has {limit:.0f}; set grad_checkpoint=True, lower group_size or the length, take a smaller "
                         "model, or train an adapter with lora_rank=16")
    listener, watch = Listener(rewards), Watch(models.policy.model)
    for number, count in enumerate((1, few.batch_size), 1):  # the first round loads kernels and starts workers
        c, start = replace(few, batch_size=count), time.perf_counter()
        sample = sampler_of(models.policy, partial(batch, data, c, number), number, c)
        collect_experience(models.policy, models.reference, listener, sample, c, dist, Timer())
    collect = (time.perf_counter() - start) / few.batch_size  # of a problem
    evaluation_seconds = time_of_evaluation(config, data, evaluation, models.policy, collect)
    times = config.batch_size * config.gradient_accumulation_steps
    whole = collect * times < CHEAP_SECONDS and (limit is None or needed <= limit)
    c, earlier = once if whole else few, len(listener.heard)

    lr = CosineLRScheduler(config.learning_rate, config.min_lr, config.warmup_iters,
                           config.lr_decay_iters or config.max_iters).lr(0)
    optimizers = [watch, *build_optimizers(models.policy, config, dist.device.type)]
    set_learning_rate(optimizers, lr)
    timer = Timer()
    sample = sampler_of(models.policy, partial(batch, data, c, 0), 0, c)
    experience = collect_experience(models.policy, models.reference, listener, sample, c, dist, timer)
    metrics = train_on_experience(models.policy, experience, optimizers, c, dist) | {"lr": lr}
    timer.end("train")
    metrics |= timer.metrics()
    seconds = sum(timer.times.values()) * times / (c.batch_size * c.gradient_accumulation_steps)
    highest = memory_in_use(dist.device)
    return Examination(
        config, models, rewards, data, batch(data, c, 0), listener.heard[earlier:] + listener.heard[:earlier],
        experience.rollouts, metrics, unclipped(watch.norms, metrics["grad_norm"]),
        Memory(highest, max(needed, highest or 0.0), limit), step_share(config, seconds, metrics), evaluation_seconds,
        dist.dtype == torch.float32)


def batch(data, c, iteration, again=0):
    """The problems of a step, as the trainer draws them, but at most c.batch_size of each micro-batch."""
    n = c.gradient_accumulation_steps
    parts = [data.problems("train", iteration, again * n + i) for i in range(n)]
    return {key: np.concatenate([part[key][: c.batch_size] for part in parts]) for key in parts[0]}


def unclipped(norms, total):
    """Norms of the parts of a gradient as they were before it was cut to the norm grad_clip. total: the norm then"""
    cut = sum(x * x for x in norms.values()) ** 0.5
    return {part: x * total / cut if cut else x for part, x in norms.items()}


def step_share(config, seconds, metrics):
    """Seconds of one of the run's optimizer steps, several of which may share their rollouts. seconds: of sampling,
    scoring and training on all problems once"""
    phases = {name: x for name, x in metrics.items() if name.startswith("time/")}
    train = seconds * metrics["time/train"] / max(sum(phases.values()), 1e-9)
    shared = config.ppo_epochs * config.minibatches  # steps that share rollouts
    rescore = train / 3 if shared > 1 else 0.0       # a forward pass without a backward pass
    return (seconds - train + rescore) / shared + train / config.minibatches


def time_of_evaluation(config, data, evaluation, policy, collect):
    """Seconds of an evaluation: measured if it is cheap, else expected. collect: seconds of a training problem"""
    problems = min(config.eval_problems, len(getattr(data, "records", {}).get("val", range(config.eval_problems))))
    expected = collect * problems * config.eval_completions / config.group_size
    if expected >= CHEAP_SECONDS:
        return expected
    start = time.perf_counter()
    evaluation(policy, config.temperature)
    return time.perf_counter() - start


def beside_weights(config, models, data, dist):
    """Megabytes of a step beside the weights, where all completions are as long as they may be."""
    return sum(size for name, size in memory_estimate(config, models, data, dist).items() if name != "weights")
