"""Our side of the comparison of learning: the models, data and rewards of a config, and grpo_training_step."""

import time

from core.distributed import Distributed
from core.training_step import build_optimizers
from grpo.build import build_data, build_models, build_rewards
from grpo.grpo_training_step import grpo_training_step


def our_steps(config, turn):
    """Trains in turns (grpo/benchmarks/side.py)."""
    dist = Distributed(config.device, config.dtype)
    data = build_data(config, dist)
    models = build_models(config, data, dist)
    rewards = build_rewards(config, models, data, dist)
    optimizers = build_optimizers(models.policy, config, dist.device.type)
    step = 0
    go_on = turn(None)
    while go_on:
        batch = data.problems("train", step)
        start = time.perf_counter()
        metrics = grpo_training_step(models.policy, models.reference, rewards, lambda _: batch, optimizers, step,
                                     config, dist)
        go_on = turn({"seconds": time.perf_counter() - start, "reward": metrics["mean_reward"]})
        step += 1
