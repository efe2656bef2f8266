"""Compares the gradient of each fill_estimator with the exact one of the same completions: a row of a table for each.

python grpo/tools/estimators.py config/grpo_any_order.py [--batches=8] [--key=value]

A batch is what one step of the config samples; rewards and advantages are the config's. Columns:

cosine      with the gradient of `trajectory`, mean and standard deviation over batches; of one_step and trajectory it
            is 1 where there is a single pass
of the sum  the same of the gradients summed over all batches, in which the noise of a single batch is smaller
norm        length of the summed gradient, as a multiple of that of `trajectory`
tokens      tokens of the texts that are planned for, as a multiple of those of `trajectory`; those behind an early end
            are not read
time        seconds of the gradient, likewise
"""

import os
import sys
import time
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import torch

from core.config import load_config
from core.distributed import Distributed, rank_and_world
from core.settings.ranges import check_ranges
from core.settings.script import run_script
from grpo.build import build_data, build_models, build_rewards, build_what_is_missing
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import compute_rollout_advantages, loss_weights
from grpo.objectives import OBJECTIVES
from grpo.policies.fill_views import FILL_ESTIMATORS, READ_PASSES
from grpo.scoring import score

EXACT = "trajectory"


@dataclass(frozen=True)
class EstimatorsConfig:
    """The setting of this tool. All other arguments are those of a run."""
    batches: int = 8  # number of batches

    def __post_init__(self):
        check_ranges(self, {"batches": "[1, 1e6]"})


def gradient(policy, rollouts, config, dist):
    """The gradient of the policy's loss on rollouts with their advantage, flat, without clipping and KL."""
    for p in policy.parameters():
        p.grad = None
    weight = loss_weights(rollouts, OBJECTIVES[config.objective].average, dist)
    for part in rollouts.reading.micro_batches(config):
        micro, rows = rollouts.select(part)
        logp = score(policy, micro, config.temperature).logp
        loss = -(logp * weight[rows] * rollouts.advantage[rows]).sum()
        loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def measure(policy, rewards, problems, config, dist):
    """{estimator: (gradient, tokens read, seconds)} of one batch; the completions are the same."""
    found, scored = {}, None
    for name in FILL_ESTIMATORS:
        passes = config.passes_read if name in READ_PASSES else GRPOConfig.passes_read
        c = replace(config, fill_estimator=name, passes_read=passes)
        rollouts = policy.sample(problems, 0, c)
        if scored is None:
            scored = rewards(rollouts)
        rollouts = compute_rollout_advantages(rollouts, scored, c, dist)
        start = time.perf_counter()
        flat = gradient(policy, rollouts, c, dist)
        found[name] = flat, int(rollouts.reading.sizes().sum()), time.perf_counter() - start
    return found


def cosine(a, b):
    return float(a @ b / (a.norm() * b.norm()))


def main(argv):
    """Prints the table."""
    own = [a for a in argv if a.startswith("--batches=")]
    c, _ = load_config(EstimatorsConfig, own)
    config, _ = load_config(GRPOConfig, [a for a in argv if a not in own])
    ranks = rank_and_world()[1]
    if ranks > 1:
        raise ValueError(f"the estimators are compared in one process, not in {ranks}: start it without torchrun")
    with Distributed(config.device, config.dtype, config.rank_timeout) as dist:
        build_what_is_missing(config, dist)
        data = build_data(config, dist)
        models = build_models(replace(config, fill_estimator="agrpo"), data, dist)  # refuses a causal generator
        rewards = build_rewards(config, models, data, dist)
        batches = [measure(models.policy, rewards, data.problems("train", i), config, dist) for i in range(c.batches)]
    if not all(batch[EXACT][0].any() for batch in batches):
        raise ValueError("a batch has no gradient, because the rewards of each group are equal: use a larger "
                         "batch_size, or a generator that is right now and then")
    print("| fill_estimator | cosine | of the sum | norm | tokens | time |\n|---|---|---|---|---|---|")
    exact = sum(batch[EXACT][0] for batch in batches)
    for name in FILL_ESTIMATORS:
        each = torch.tensor([cosine(batch[name][0], batch[EXACT][0]) for batch in batches])
        total = sum(batch[name][0] for batch in batches)
        tokens, seconds = (sum(batch[name][i] for batch in batches) / sum(batch[EXACT][i] for batch in batches)
                           for i in (1, 2))
        deviation = float(each.std(correction=min(1, len(each) - 1)))
        print(f"| {name} | {float(each.mean()):.3f} ± {deviation:.3f} | {cosine(total, exact):.3f} | "
              f"{float(total.norm() / exact.norm()):.2f} | {tokens:.2f} | {seconds:.2f} |")


if __name__ == "__main__":
    run_script(main)
