"""Run by test_distributed.py, alone or under torchrun: ten steps of every objective, and every advantage.

python tests/rank_worker.py DATASET PROMPTS OUT BATCH_SIZE ACCUMULATION
"""

import copy
import itertools
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch

from core.batch import unpack_batch
from core.checkpoint_manager import freeze
from core.distributed import Distributed
from core.pretrain_config import PretrainConfig
from core.training_step import build_optimizers, training_step
from grpo.advantages import ADVANTAGES
from grpo.grpo_training_step import gather_experience, grpo_training_step, train_on_rollouts
from grpo.objectives import OBJECTIVES
from grpo.rollout import join
from grpo.rewards import Rewards
from tests.tiny import CAUSAL, TOKENIZER, causal_model, config, consumer, judge, model, prompt_consumer, rewards

dataset, prompts, out = sys.argv[1:4]
batch_size, accumulation = map(int, sys.argv[4:])
dist = Distributed("cpu")
result = {}
weights = lambda: torch.cat([p.flatten() for p in policy.parameters()]).detach()
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

for objective, advantage in CHOICES:  # completions of prompts, of unequal lengths
    c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, objective=objective,
               advantage=advantage, learning_rate=1e-3, grad_clip=1.0, max_new_tokens=6, task_type="general",
               length_min=1, length_max=6)
    name = f"causal/{objective}/{advantage}"
    policy = causal_model(seed=1 + dist.rank, scale=3.0)
    dist.broadcast(policy)
    reference, optimizers = freeze(causal_model(seed=9)), build_optimizers(policy, c)
    data = prompt_consumer(prompts, c, rank=dist.rank, world=dist.world)
    batch = join([data.problems("train", 0, micro) for micro in range(accumulation)])
    grpo_training_step(policy, reference, Rewards(c), batch, optimizers, 1e-3, 0, c, CAUSAL, dist)
    result[name] = weights()

# Two epochs of one minibatch, through the phases, and groups replaced on one rank more than on the other
for name, settings in {"epochs": {"ppo_epochs": 2}, "alone/resample": {"zero_std": "resample", "kl_beta": 0.0}}.items():
    c = config(batch_size=batch_size, gradient_accumulation_steps=accumulation, objective="dapo", learning_rate=1e-3,
               **settings)
    policy = model(seed=1, scale=3.0)
    reference = freeze(copy.deepcopy(policy)) if c.kl_beta else None
    data, optimizers = consumer(dataset, c, rank=dist.rank, world=dist.world), build_optimizers(policy, c)
    inner = rewards(c, judge())

    def flat_on_a_rank(rollouts):
        reward, credit, values = inner(rollouts)
        keep = 1.0 - (dist.rank == 1 or dist.world == 1) * (torch.arange(len(reward)) % 2 == 0)[:, None].float()
        keep = keep if name.startswith("alone") else torch.ones_like(keep)
        return reward * keep, credit * keep[..., None], values

    draw = lambda again: join([data.batch("train", 0, again * accumulation + i) for i in range(accumulation)])
    rollouts, sums, _ = gather_experience(policy, reference, flat_on_a_rank, draw(0), 0, c, TOKENIZER, dist,
                                          spare=lambda again: draw(1 + again))
    for _ in range(c.ppo_epochs):
        metrics = train_on_rollouts(policy, rollouts, sums, optimizers, 1e-3, c, dist)
    result[name] = weights()
    result[f"{name}/metrics"] = torch.tensor([metrics[k] for k in ("loss", "entropy", "kl_to_old", "mean_reward")])

policy = model(seed=1, scale=1.0)
optimizers = build_optimizers(policy, PretrainConfig())
data = consumer(dataset, config(batch_size=batch_size), rank=dist.rank, world=dist.world)
for step in range(10):
    batches = [unpack_batch(data.batch("train", step, micro), "cpu") for micro in range(accumulation)]
    training_step(policy, batches, optimizers, 1e-3, 1.0, dist)
result["supervised"] = weights()
torch.save(result, f"{out}-{dist.rank}.pt")
dist.close()
