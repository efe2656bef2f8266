"""Run by test_ranks_bad_steps.py under torchrun: rank 1 alone has a number that is not finite.

python tests/grpo/bad_step_worker.py DATASET PROMPTS OUT
"""

import os
import sys

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))

import torch

from core import trainer as supervised
from core.dataset_consumer import unpack_batch
from core.distributed import Distributed
from core.logger import create_logger
from core.supervised.config import PretrainConfig
from core.training_step import build_optimizers
from grpo.grpo_trainer import GRPOTrainer
from grpo.grpo_training_step import grpo_training_step
from grpo.reward_functions.registry import reward
from grpo.reward_functions.trl import TrainerState
from grpo.rewards import Rewards, Scored
from tests.tiny import (
    causal_policy,
    config,
    consumer,
    fill_policy,
    judge,
    model,
    prompt_config,
    prompt_consumer,
    rewards,
    step_problems,
)

dataset, prompts, out = sys.argv[1:4]
dist = Distributed("cpu", "float32")
bad = torch.nan if dist.rank == 1 else 1.0
result = {}


def weights(policy):
    return torch.cat([p.flatten() for p in policy.parameters()]).detach().clone()


def note(name, policy, before, metrics):
    result[name] = {"moved": not torch.equal(before, weights(policy)), "weights": weights(policy),
                    "skipped_steps": metrics["skipped_steps"]}


def damaged(net):
    """On rank 1, a model whose outputs are not finite."""
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(bad)
    return net


def step(name, policy, reference=None, scorer=None, data=None, **settings):
    """A step of both ranks."""
    c = config(batch_size=2, grad_clip=1.0, **{"kl_beta": 0.1 if reference else 0.0} | settings)
    data = data or consumer(dataset, c, rank=dist.rank, world=dist.world)
    before = weights(policy)
    metrics = grpo_training_step(policy, reference, scorer or rewards(c, judge()), step_problems(data, c),
                                 build_optimizers(policy, c), 0, c, dist)
    note(name, policy, before, metrics)


def damaged_reference():
    reference = fill_policy().frozen()
    damaged(reference.model)
    return reference


def with_bad_gradient(policy):
    next(policy.model.parameters()).register_hook(lambda gradient: gradient * bad)
    return policy


def with_bad_logits(policy, in_training):
    """On rank 1, logits that are not finite: in training or while sampling."""
    project = policy.model.project
    policy.model.project = lambda h: project(h) * (bad if torch.is_grad_enabled() == in_training else 1.0)
    return policy


def reward_of(value):
    """A rewards object: random, but on rank 1 this value for the first completion."""
    def scored(rollouts):
        x = torch.rand(rollouts.problems, 4, generator=torch.Generator().manual_seed(dist.rank))
        x[0, 0] = value if dist.rank == 1 else x[0, 0]
        return Scored(x)
    return scored


step("nothing", fill_policy(), None, reward_of(0.5))
step("gradient", with_bad_gradient(fill_policy()))
step("loss", with_bad_logits(fill_policy(), in_training=True))
step("sampler", with_bad_logits(fill_policy(), in_training=False))
for settings in ({}, {"kl_estimator": "k3"}, {"kl_in_reward": True}):
    step(f"reference {settings}", fill_policy(), damaged_reference(), **settings)
for settings in ({}, {"credit_window": 3}):
    step(f"judge {settings}", fill_policy(), None, rewards(config(**settings), damaged(judge())), **settings)
for objective in ("grpo", "plain", "reinforce++"):
    for value in (torch.inf, -torch.inf):
        step(f"reward {objective} {value}", fill_policy(), None, reward_of(value), objective=objective)
step("resampled", fill_policy(), None, reward_of(torch.inf), zero_std="resample", objective="dapo")


@reward(0, 9)
def of_rank_1(completions):
    return [bad * len(text) for text in completions]


c = prompt_config(batch_size=2, kl_beta=0.0, reward_functions=("of_rank_1",))
step("prompts", causal_policy(), None, Rewards(c), prompt_consumer(prompts, c, rank=dist.rank, world=dist.world),
     max_new_tokens=6)

# Supervised: the loss of one rank
net = model()
before, optimizers = weights(net), build_optimizers(net, PretrainConfig())
data = consumer(dataset, config(batch_size=2), rank=dist.rank, world=dist.world)
sums = supervised.supervised_sums
supervised.supervised_sums = lambda *arguments: {name: x * bad for name, x in sums(*arguments).items()}
note("supervised", net, before, supervised.training_step(net, [unpack_batch(data.batch("train", 0, 0), "cpu")],
                                                         optimizers, 1.0, dist))

# A whole run whose second of three iterations has a bad reward
c = config(batch_size=2, max_iters=6, minibatches=2, kl_beta=0.0, out_dir=f"{out}-run", save_interval=1,
           eval_interval=9, sample_interval=9)


class OnceBad:
    state = TrainerState()

    def __call__(self, rollouts):
        return reward_of(torch.inf if self.state.global_step == 2 else 0.5)(rollouts)


policy = fill_policy()
trainer = GRPOTrainer(policy, None, OnceBad(), consumer(dataset, c, rank=dist.rank, world=dist.world),
                      lambda policy, temperature: ({"kl": 0.0}, []), c, create_logger(c, dist, 6, ("loss",)), dist)
before = weights(policy)
trainer.run()
note("run", policy, before, {"skipped_steps": trainer.skipped_steps})
result["run"] |= {"step": trainer.step, "iteration": trainer.iteration}
torch.save(result, f"{out}-{dist.rank}.pt")
dist.close()
