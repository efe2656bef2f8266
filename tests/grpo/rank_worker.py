"""Run by test_ranks.py, alone or under torchrun: steps of every objective, KL estimator and advantage.

python tests/grpo/rank_worker.py DATASET PROMPTS OUT BATCH_SIZE ACCUMULATION
"""

import dataclasses
import itertools
import os
import pathlib
import sys

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))

import torch

from core.dataset_consumer import unpack_batch
from core.distributed import Distributed
from core.supervised.config import PretrainConfig
from core.trainer import training_step
from core.training_step import build_optimizers
from grpo.advantages import ADVANTAGES
from grpo.grpo_training_step import Timer, collect_experience, train_on_experience
from grpo.objectives import OBJECTIVES
from grpo.policies.fill_views import FILL_ESTIMATORS
from grpo.rewards import Rewards, Scored
from grpo.samplers.local import LocalSampler
from grpo.samplers.prefetch import Prefetcher
from tests.tiny import (
    Catcher,
    causal_policy,
    collect,
    config,
    consumer,
    fill_policy,
    grpo_step,
    judge,
    model,
    prompt_consumer,
    rewards,
    step_problems,
    train,
)

dataset, prompts, out = sys.argv[1:4]
batch_size, accumulation = map(int, sys.argv[4:])
dist = Distributed("cpu", "float32")
result = {}


def weights(policy):
    return torch.cat([p.flatten() for p in policy.parameters()]).detach()


KL = [{"kl_beta": 0.0}, *({"kl_estimator": name} for name in ("exact", "k2", "k3")), {"kl_in_reward": True},
      {"kl_importance": False, "kl_estimator": "k3"}, {"entropy_bonus": 0.1}]
CHOICES = [(name, None) for name in OBJECTIVES] + [("plain", name) for name in ADVANTAGES]
for (objective, advantage), window in itertools.product(CHOICES, (None, 3)):
    c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, objective=objective,
               advantage=advantage, credit_window=window, learning_rate=1e-3, min_lr=1e-3, grad_clip=1.0)
    name = f"{objective}/{advantage}/{window}"
    policy = fill_policy(seed=1 + dist.rank, scale=3.0)
    dist.broadcast(policy.parameters())
    reference = policy.frozen()
    data = consumer(dataset, c, rank=dist.rank, world=dist.world)
    optimizers = build_optimizers(policy, c)
    for step in range(5):
        metrics = grpo_step(policy, reference, rewards(c, judge()), data, c, step, optimizers, dist)
        if step == 0:
            result[f"{name}/first"] = weights(policy)
            result[f"{name}/metrics"] = torch.tensor(
                [metrics[k] for k in ("loss", "mean_reward", "std_reward", "entropy", "grad_norm",
                                      "unique_completions")])
    result[f"{name}/last"] = weights(policy)


def later_gradient(policy, name, c, data, scorer, reference=None):
    """Collects rollouts and moves the policy, the same way on every rank; then the gradient of its step on them."""
    experience = collect(policy, scorer, data, c, reference, dist)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * p.abs().mean() * torch.randn_like(p))
    catcher = Catcher(policy)
    metrics = train(policy, dataclasses.replace(experience, on_policy=False), c, [catcher], dist)
    result[f"{name}/metrics"] = torch.tensor([metrics.get(key, 0.0) for key in (
        "loss", "pg_loss", "kl_penalty", "mean_kl", "entropy", "mean_reward", "grad_norm", "clip_fraction",
        "kl_to_old")])
    result[name] = catcher.gradient


# Completions of prompts, of unequal lengths, on which the policy takes a second step: ratios are not 1
for (objective, advantage), kl in itertools.product(CHOICES, KL):
    c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, objective=objective,
               advantage=advantage, max_new_tokens=6, task_type="general", length_min=1, length_max=6, ppo_epochs=2,
               **kl)
    policy, reference = causal_policy(seed=1, scale=3.0), causal_policy(seed=9).frozen() if c.kl_beta else None
    data = prompt_consumer(prompts, c, rank=dist.rank, world=dist.world)
    later_gradient(policy, f"causal/{objective}/{advantage}/{kl}", c, data, Rewards(c), reference)

# Sampler and scorer differ by more the larger the number of the problem is: the largest difference is on one rank
c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, max_new_tokens=6, kl_beta=0.0,
           task_type="general", length_min=1, length_max=6)
policy = causal_policy(seed=1, scale=3.0)
sample = policy.sample


def sample_with_errors(problems, iteration, config):
    rollouts = sample(problems, iteration, config)
    off = 1e-3 * (1 + torch.as_tensor(problems["number"])).repeat_interleave(config.group_size)[:, None]
    return dataclasses.replace(rollouts, old_logp=rollouts.old_logp - off * rollouts.mask)


policy.sample = sample_with_errors
# Scored in training, and before it; then with importance weights, which a part of the tokens or completions exceeds
for i, settings in enumerate(({}, {"ppo_epochs": 2}, *({"importance": name, "importance_cap": 1.0045,
                                                        "max_staleness": 1} for name in ("token", "sequence_mask")))):
    now = dataclasses.replace(c, **settings)
    data = prompt_consumer(prompts, now, rank=dist.rank, world=dist.world)
    experience = collect(policy, Rewards(now), data, now, None, dist)
    catcher = Catcher(policy)
    metrics = train(policy, experience, now, [catcher], dist)
    result[f"mismatch/{i}/metrics"] = torch.tensor([metrics.get(key, 0.0) for key in (
        "mismatch_max", "mismatch_kl", "mismatch_mean", "ratio_minus_one", "ratio_min", "ratio_mean", "ratio_max",
        "effective_sample_size", "importance_capped", "importance_rejected")])
    result[f"mismatch/{i}"] = catcher.gradient

# Completions that were written an iteration ago, each rank its own share
c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, max_staleness=1, importance="token",
           learning_rate=1e-3, min_lr=1e-3, grad_clip=1.0, kl_beta=0.0)
policy, data = fill_policy(seed=1, scale=3.0), consumer(dataset, c, rank=dist.rank, world=dist.world)
prefetcher = Prefetcher(LocalSampler(policy, c), policy, lambda iteration: step_problems(data, c, iteration)(), c)
optimizers = build_optimizers(policy, c)
for step in range(10):
    sample = lambda again, count=None: prefetcher.get(step_problems(data, c, step)(), step, again, last=9)
    experience = collect_experience(policy, None, rewards(c, judge()), sample, c, dist, Timer())
    metrics = train_on_experience(policy, experience, optimizers, c, dist)
    if step == 0:
        result["ahead/first"] = weights(policy)
result["ahead/last"] = weights(policy)
result["ahead/metrics"] = torch.tensor([metrics[key] for key in ("staleness", "dropped_rollouts", "mean_reward")])

# The estimators of several passes
for estimator in FILL_ESTIMATORS:
    c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, ppo_epochs=2, unmask_steps=3,
               fill_estimator=estimator)
    policy, reference = fill_policy(seed=1, scale=3.0), fill_policy(seed=9).frozen()
    data = consumer(dataset, c, rank=dist.rank, world=dist.world)
    later_gradient(policy, f"passes/{estimator}", c, data, rewards(c, judge()), reference)

# Groups replaced on one rank more than on the other
c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, objective="dapo", ppo_epochs=2,
           zero_std="resample", kl_beta=0.0)
inner = rewards(c, judge())


def equal_on_a_rank(rollouts):
    """On rank 1, or without other ranks, every second group has equal rewards."""
    reward = inner(rollouts).reward
    alone = dist.rank == 1 or dist.world == 1
    return Scored(torch.where(alone & (torch.arange(len(reward)) % 2 == 0)[:, None], 0.0, reward))


policy = fill_policy(seed=1, scale=3.0)
later_gradient(policy, "alone/resample", c, consumer(dataset, c, rank=dist.rank, world=dist.world), equal_on_a_rank)

# Groups that differ on rank 1 alone, then on no rank
c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, zero_std="drop", kl_beta=0.0)
empty_steps, policy = [], fill_policy(seed=1, scale=3.0)
data, optimizers = consumer(dataset, c, rank=dist.rank, world=dist.world), build_optimizers(policy, c)
for step, different in enumerate((dist.rank == 1, False)):
    scorer = lambda rollouts: Scored(inner(rollouts).reward * different)
    metrics = grpo_step(policy, None, scorer, data, c, step, optimizers, dist)
    empty_steps.append(metrics["empty_steps"])
result["alone/empty_steps"] = torch.tensor(empty_steps)

policy = model(seed=1, scale=1.0)
start, optimizers = weights(policy), build_optimizers(policy, PretrainConfig())
data = consumer(dataset, config(batch_size=batch_size), rank=dist.rank, world=dist.world)
for step in range(10):
    parts = [unpack_batch(data.batch("train", step, micro), "cpu") for micro in range(accumulation)]
    training_step(policy, parts, optimizers, 1.0, dist)
result["supervised"] = weights(policy) - start
torch.save(result, f"{out}-{dist.rank}.pt")
dist.close()
threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]  # where there is such a folder
assert not any("gloo" in name for name in threads), "a thread that outlives Python can abort the process as it ends"
