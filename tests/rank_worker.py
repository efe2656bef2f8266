"""Run by test_distributed.py, alone or under torchrun: steps of every objective, KL estimator and advantage.

python tests/rank_worker.py DATASET PROMPTS OUT BATCH_SIZE ACCUMULATION
"""

import copy
import itertools
import os
import pathlib
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.batch import unpack_batch
from core.checkpoint_manager import freeze
from core.distributed import Distributed
from core.pretrain_config import PretrainConfig
from core.training_step import build_optimizers, training_step
from grpo.advantages import ADVANTAGES
from grpo.fill_views import FILL_ESTIMATORS
from grpo.grpo_training_step import gather_experience, grpo_training_step, train_on_rollouts
from grpo.objectives import OBJECTIVES
from grpo.rollout import join
from grpo.rewards import Rewards
from tests.tiny import (CAUSAL, TOKENIZER, Catcher, causal_model, config, consumer, judge, model, prompt_consumer,
                        rewards)

dataset, prompts, out = sys.argv[1:4]
batch_size, accumulation = map(int, sys.argv[4:])
dist = Distributed("cpu")
result = {}
weights = lambda: torch.cat([p.flatten() for p in policy.parameters()]).detach()
KL = [{"kl_beta": 0.0}, *({"kl_estimator": name} for name in ("exact", "k2", "k3")), {"kl_in_reward": True},
      {"kl_importance": True, "kl_estimator": "k2"}, {"kl_importance": True, "entropy_bonus": 0.1}]
CHOICES = [(name, None) for name in OBJECTIVES] + [("plain", name) for name in ADVANTAGES]
for (objective, advantage), window in itertools.product(CHOICES, (None, 3)):
    c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, objective=objective,
               advantage=advantage, credit_window=window, learning_rate=1e-3, grad_clip=1.0)
    name = f"{objective}/{advantage}/{window}"
    policy = model(seed=1 + dist.rank, scale=3.0)
    dist.broadcast(policy)
    reference = freeze(copy.deepcopy(policy))
    data = consumer(dataset, c, rank=dist.rank, world=dist.world)
    optimizers = build_optimizers(policy, c)
    for step in range(10):
        batch = join([data.batch("train", step, micro) for micro in range(accumulation)])
        metrics = grpo_training_step(policy, reference, rewards(c, judge()), batch, optimizers, 1e-3, step, c,
                                     TOKENIZER, dist)
        if step == 0:
            result[f"{name}/first"] = weights()
            result[f"{name}/metrics"] = torch.tensor(
                [metrics[k] for k in ("loss", "mean_reward", "std_reward", "entropy", "grad_norm",
                                      "unique_completions")])
    result[f"{name}/last"] = weights()

def later_gradient(policy, name, c, data, tokenizer, score, reference=None):
    """Rollouts of a step; then the policy moves, the same way on every rank, and what it would learn from them next."""
    draw = lambda again: join([data.problems("train", 0, again * accumulation + i) for i in range(accumulation)])
    rollouts, sums, _ = gather_experience(policy, reference, score, draw(0), 0, c, tokenizer, dist,
                                          spare=lambda again: draw(1 + again))
    torch.manual_seed(7)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * p.abs().mean() * torch.randn_like(p))
    catcher = Catcher(policy)
    metrics = train_on_rollouts(policy, rollouts, sums, [catcher], 1e-3, c, dist, on_policy=False)
    result[f"{name}/metrics"] = torch.tensor([metrics.get(key, 0.0) for key in (
        "loss", "pg_loss", "kl_penalty", "mean_kl", "entropy", "mean_reward", "grad_norm", "clip_fraction",
        "kl_to_old")])
    result[name] = catcher.gradient


# Completions of prompts, of unequal lengths, on which the policy takes a second step: ratios are not 1
for (objective, advantage), kl in itertools.product(CHOICES, KL):
    c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, objective=objective,
               advantage=advantage, max_new_tokens=6, task_type="general", length_min=1, length_max=6, ppo_epochs=2,
               **kl)
    policy, reference = causal_model(seed=1, scale=3.0), freeze(causal_model(seed=9)) if c.kl_beta else None
    data = prompt_consumer(prompts, c, rank=dist.rank, world=dist.world)
    later_gradient(policy, f"causal/{objective}/{advantage}/{kl}", c, data, CAUSAL, Rewards(c), reference)

# The estimators of several passes
for estimator in FILL_ESTIMATORS:
    c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, ppo_epochs=2, unmask_steps=3,
               fill_estimator=estimator)
    policy, reference = model(seed=1, scale=3.0), freeze(model(seed=9))
    data = consumer(dataset, c, rank=dist.rank, world=dist.world)
    later_gradient(policy, f"passes/{estimator}", c, data, TOKENIZER, rewards(c, judge()), reference)

# Groups replaced on one rank more than on the other
c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, objective="dapo", ppo_epochs=2,
           zero_std="resample", kl_beta=0.0)
inner = rewards(c, judge())


def flat_on_a_rank(rollouts):
    reward, credit, values = inner(rollouts)
    keep = 1.0 - (dist.rank == 1 or dist.world == 1) * (torch.arange(len(reward)) % 2 == 0)[:, None].float()
    return reward * keep, credit * keep[..., None], values


policy = model(seed=1, scale=3.0)
later_gradient(policy, "alone/resample", c, consumer(dataset, c, rank=dist.rank, world=dist.world), TOKENIZER,
               flat_on_a_rank)

policy = model(seed=1, scale=1.0)
optimizers = build_optimizers(policy, PretrainConfig())
data = consumer(dataset, config(batch_size=batch_size), rank=dist.rank, world=dist.world)
for step in range(10):
    batches = [unpack_batch(data.batch("train", step, micro), "cpu") for micro in range(accumulation)]
    training_step(policy, batches, optimizers, 1e-3, 1.0, dist)
result["supervised"] = weights()
torch.save(result, f"{out}-{dist.rank}.pt")
dist.close()
threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]  # where there is such a folder
assert not any("gloo" in name for name in threads), "a thread that outlives Python can abort the process as it ends"
