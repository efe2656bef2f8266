"""The first step of a run, taken to be examined: its samples, their rewards and the gradient."""

import re
from dataclasses import dataclass, replace

from grpo.grpo_training_step import Timer, collect_rollouts, sampler_of, train_on_rollouts

MOST = 16  # problems of the step


@dataclass
class Examination:
    """The step that the checks read."""
    config: object
    models: object             # policy, reference, judge, gold_judge (grpo/build.py: Models)
    rewards: object
    data: object
    problems: dict             # those of the step, as the policy samples for them
    rollouts: object           # Rollouts of the step, with their texts
    scored: object             # their rewards: a Scored
    gradient: dict             # {part of the model: norm}


def examine(config, models, rewards, data, dist):
    """An Examination of the first optimizer step of a run, on at most MOST of its problems. Nothing is written, and no
    weight is changed."""
    if dist.world > 1:
        raise ValueError(f"doctor=True examines a step in one process, not in {dist.world}: start it without torchrun")
    policy = models.policy
    c = replace(config, batch_size=min(MOST, config.batch_size), gradient_accumulation_steps=1, ppo_epochs=1,
                minibatches=1, grad_clip=0.0)

    def problems(again):
        return {key: x[: c.batch_size] for key, x in data.problems("train", 0, again).items()}

    sample = sampler_of(policy, problems, 0, c)
    trained, sums, sampled = collect_rollouts(policy, models.reference, rewards, sample, c, dist, Timer())
    train_on_rollouts(policy, trained, sums, [], c, dist)  # without an optimizer the gradient stays
    return Examination(config, models, rewards, data, problems(0), *sampled[0], gradient_norms(policy.model))


def gradient_norms(model):
    """{part of a model: norm of its gradient}. With an adapter only its own weights count."""
    squares = {}
    adapter = any("lora_" in name for name, _ in model.named_parameters())
    for name, p in model.named_parameters():
        if p.requires_grad or not adapter:
            square = 0.0 if p.grad is None else float(p.grad.float().square().sum())
            squares[part_of(name)] = squares.get(part_of(name), 0.0) + square
    return {part: square**0.5 for part, square in squares.items()}


def part_of(name):
    """The part of a model that a parameter belongs to: its layer, or the module outside the layers."""
    layer = re.search(r"\.(\d+)\.", name)
    module = re.sub(r"\.(weight|bias)$", "", name).split(".")[-1]
    return f"layer {layer[1]}" if layer else module
