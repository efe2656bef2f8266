"""The first step of a run, taken to be examined: its samples and scores, the gradient, the memory and the time."""

import re
from dataclasses import dataclass, replace
from functools import partial

import torch

from core.run.memory import memory_in_use, memory_limit
from core.scheduler import CosineLRScheduler
from core.training_step import build_optimizers, set_learning_rate
from grpo.evaluation.memory import memory_estimate
from grpo.grpo_training_step import Timer, collect_experience, sampler_of, train_on_experience

MOST = 16  # problems of the step
OUTSIDE = {"embed": "the embedding", "norm": "the last normalization", "head": "the output layer"}  # of our models


@dataclass
class Memory:
    """Megabytes; None where the system does not tell."""
    highest: float | None  # that this process has needed so far
    needed: float          # expected where all completions are as long as they may be
    limit: float | None    # that this process can have


@dataclass
class Examination:
    """What the checks read. The seconds are those that the run's own steps and evaluations are expected to take."""
    config: object
    models: object             # policy, reference, judge, gold_judge (grpo/build.py: Models)
    rewards: object
    data: object
    problems: dict             # those of the step, as the policy samples for them
    sampled: list              # [(Rollouts with their texts, Scored)] of the step, and of the problem before it
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


def examine(config, models, rewards, data, dist):
    """An Examination of the first optimizer step of a run, on at most MOST of its problems. Nothing is written.

    Raises ValueError if the step does not fit into memory.
    """
    if dist.world > 1:
        raise ValueError(f"doctor=True examines a step in one process, not in {dist.world}: start it without torchrun")
    if dist.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(dist.device)
    c = replace(config, batch_size=min(MOST, config.batch_size), gradient_accumulation_steps=1, ppo_epochs=1,
                minibatches=1)
    limit = memory_limit(dist.device)
    before = memory_in_use(dist.device) or 0.0
    needed = before + besides_weights(c, models, data, dist)
    if limit is not None and needed > limit:
        raise ValueError(f"a step on {c.batch_size} problems needs about {needed:.0f} MB, but {dist.device} has "
                         f"{limit:.0f}; set grad_checkpoint=True, lower group_size or the length, take a smaller "
                         "model, or train an adapter with lora_rank=16")
    listener, watch = Listener(rewards), Watch(models.policy.model)
    lr = CosineLRScheduler(config.learning_rate, config.min_lr, config.warmup_iters,
                           config.lr_decay_iters or config.max_iters).lr(0)
    optimizers = [watch, *build_optimizers(models.policy, config, dist.device.type)]
    set_learning_rate(optimizers, lr)

    one = replace(c, batch_size=1)
    collect(models, listener, data, one, 1, dist, Timer())  # loads kernels and starts workers
    first = len(listener.heard)
    timer = Timer()
    experience = collect(models, listener, data, c, 0, dist, timer)
    metrics = train_on_experience(models.policy, experience, optimizers, c, dist) | {"lr": lr}
    timer.end("train")
    metrics |= timer.metrics()

    times = config.batch_size * config.gradient_accumulation_steps / c.batch_size
    seconds = {phase: x * times for phase, x in timer.times.items()}  # of the run's own step
    highest = memory_in_use(dist.device)
    needed = before + besides_weights(replace(config, ppo_epochs=1, minibatches=1), models, data, dist)
    return Examination(
        config, models, rewards, data, batch(data, c, 0), listener.heard[first:] + listener.heard[:first],
        experience.rollouts, metrics, unclipped(watch.norms, metrics["grad_norm"]),
        Memory(highest, max(needed, highest or 0.0), limit), step_share(config, seconds),
        of_evaluation(config, data, seconds), dist.dtype == torch.float32)


def collect(models, rewards, data, c, iteration, dist, timer):
    """The Experience of an iteration, without training on it."""
    sample = sampler_of(models.policy, partial(batch, data, c, iteration), iteration, c)
    return collect_experience(models.policy, models.reference, rewards, sample, c, dist, timer)


def batch(data, c, iteration, again=0):
    """The first c.batch_size problems of an iteration, as the trainer draws them."""
    return {key: x[: c.batch_size] for key, x in data.problems("train", iteration, again).items()}


def unclipped(norms, total):
    """Norms of the parts of a gradient as they were before it was cut to the norm grad_clip. total: the norm then"""
    cut = sum(x * x for x in norms.values()) ** 0.5
    return {part: x * total / cut if cut else x for part, x in norms.items()}


def step_share(config, seconds):
    """Seconds of one of the run's optimizer steps, several of which may share their rollouts.

    seconds: {phase: of sampling, scoring and training on all problems once}
    """
    train = seconds["train"]
    collecting = sum(seconds.values()) - train
    shared = config.ppo_epochs * config.minibatches  # steps that share rollouts
    if shared > 1:
        collecting += train / 3  # the policy scores its rollouts: a forward pass without a backward pass
    return collecting / shared + train / config.minibatches


def of_evaluation(config, data, seconds):
    """Seconds that an evaluation is expected to take: those of the run's step without training, by completions."""
    collecting = sum(seconds.values()) - seconds["train"]
    completions = config.batch_size * config.gradient_accumulation_steps * config.group_size
    problems = min(config.eval_problems, len(getattr(data, "records", {}).get("val", range(config.eval_problems))))
    return collecting * problems * config.eval_completions / completions


def besides_weights(config, models, data, dist):
    """Megabytes of a step besides the weights, where all completions are as long as they may be."""
    return sum(size for name, size in memory_estimate(config, models, data, dist).items() if name != "weights")
