"""Run by test_ranks.py, alone or under torchrun: steps of every objective, KL estimator and advantage.

python tests/runs/rank_worker.py DATASET PROMPTS OUT LAYOUT...
A layout is BATCH_SIZExACCUMULATION, as 4x2. Writes <OUT>-<layout>-<rank>.pt for each.
"""

import dataclasses
import itertools
import os
import pathlib
import sys
from types import SimpleNamespace

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))

import torch

from core.data import unpack_batch
from core.distributed import Distributed
from core.logger import create_logger
from core.optim import build_optimizers
from core.supervised.config import PretrainConfig
from core.trainer import training_step
from grpo.grpo_trainer import GRPOTrainer
from grpo.losses import ADVANTAGES, OBJECTIVES
from grpo.rewards import Rewards, Scored
from tests.tiny import (
    Catcher, causal_policy, collect, config, consumer, fill_policy, grpo_step, judge, model, prompt_consumer, rewards,
    train)
from tests.trainers import RARELY, no_evaluation

KL = [{"kl_estimator": "exact"}, {"kl_beta": 0.0}, {"kl_estimator": "k2"}, {"kl_estimator": "k3"},
      {"kl_in_reward": True}, {"entropy_bonus": 0.1}]
CHOICES = [(name, None) for name in OBJECTIVES] + [("plain", name) for name in ADVANTAGES]
PROMPTS = {"max_new_tokens": 6, "task_type": "general", "reward_settings": {"length_min": 1, "length_max": 6}}
MOVING = {"learning_rate": 1e-3, "min_lr": 1e-3, "grad_clip": 1.0}
STEP = ("loss", "mean_reward", "std_reward", "entropy", "grad_norm", "unique_completions")
LATER = ("loss", "pg_loss", "kl_penalty", "mean_kl", "entropy", "mean_reward", "grad_norm", "mismatch_max",
         "mismatch_kl", "ratio_minus_one", "effective_sample_size", "clip_fraction", "kl_to_old")


def weights(policy):
    return torch.cat([p.flatten() for p in policy.parameters()]).detach()


class Layout:
    """The steps of one layout: {name: tensor} in `result`."""

    def __init__(self, batch_size, accumulation):
        self.cut = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        self.result = {}

    def config(self, **settings):
        return config(**self.cut | settings)

    def texts(self, c):
        return consumer(dataset, c, rank=dist.rank, world=dist.world)

    def prompts(self, c):
        return prompt_consumer(prompts, c, rank=dist.rank, world=dist.world)

    def note(self, name, metrics, keys):
        self.result[f"{name}/metrics"] = torch.tensor([metrics.get(key, 0.0) for key in keys])

    def several_steps(self):
        """Three steps of fill-in for every objective and advantage."""
        for (objective, advantage), window in itertools.product(CHOICES, (None, 3)):
            if window and advantage:
                continue
            c = self.config(objective=objective, advantage=advantage, credit_window=window, **MOVING)
            name, policy = f"{objective}/{advantage}/{window}", fill_policy(seed=1 + dist.rank, scale=3.0)
            dist.broadcast(policy.parameters())
            reference, data, optimizers = policy.frozen(), self.texts(c), build_optimizers(policy, c)
            for step in range(3):
                metrics = grpo_step(policy, reference, rewards(c, judge()), data, c, step, optimizers, dist)
                if step == 0:
                    self.result[f"{name}/first"] = weights(policy)
                    self.note(name, metrics, STEP)
            self.result[f"{name}/last"] = weights(policy)

    def later_gradient(self, policy, name, c, data, scorer, reference=None):
        """Collects rollouts and moves the policy, the same way on every rank; then the gradient of its step on them.
        Sampler and scorer differ by more the larger the number of the problem is: by most on one rank."""
        sample = policy.sample

        def sample_with_errors(problems, iteration, config):
            rollouts = sample(problems, iteration, config)
            off = 1e-3 * (1 + torch.as_tensor(problems["number"])).repeat_interleave(config.group_size)[:, None]
            return dataclasses.replace(rollouts, old_logp=rollouts.old_logp - off * rollouts.mask)

        policy.sample = sample_with_errors
        rollouts, sums = collect(policy, scorer, data, c, reference, dist)
        torch.manual_seed(7)
        with torch.no_grad():
            for p in policy.parameters():
                p.add_(0.3 * p.abs().mean() * torch.randn_like(p))
        catcher = Catcher(policy)
        self.note(name, train(policy, rollouts, sums, c, [catcher], dist), LATER)
        self.result[name] = catcher.gradient

    def later_steps(self):
        """Second steps on completions of prompts, of unequal lengths, and on texts filled in in several passes."""
        settings = [(*choice, KL[i % len(KL)]) for i, choice in enumerate(CHOICES)]
        for objective, advantage, kl in (*settings, *(("grpo", None, kl) for kl in KL)):
            c = self.config(objective=objective, advantage=advantage, ppo_epochs=2, **PROMPTS, **kl)
            policy, reference = causal_policy(seed=1, scale=3.0), causal_policy(seed=9).frozen() if c.kl_beta else None
            name = f"causal/{objective}/{advantage}/{kl}"
            self.later_gradient(policy, name, c, self.prompts(c), Rewards(c), reference)
        c = self.config(teacher_checkpoint="passed below", kl_beta=0.0, group_size=1, max_new_tokens=6, ppo_epochs=2)
        teacher = causal_policy(seed=9, n_layer=2).frozen()
        self.later_gradient(causal_policy(seed=1, scale=3.0), "taught", c, self.prompts(c), Rewards(c), teacher)
        for estimator in ("trajectory", "one_step"):
            c = self.config(ppo_epochs=2, unmask_steps=3, fill_estimator=estimator)
            policy, reference = fill_policy(seed=1, scale=3.0), fill_policy(seed=9).frozen()
            self.later_gradient(policy, f"passes/{estimator}", c, self.texts(c), rewards(c, judge()), reference)

    def groups_on_one_rank(self):
        """Groups that are replaced on one rank more than on the other; that differ on rank 1 alone, or on none."""
        def equal_on_a_rank(rollouts):
            reward = inner(rollouts).reward
            alone = dist.rank == 1 or dist.world == 1
            return Scored(torch.where(alone & (torch.arange(len(reward)) % 2 == 0)[:, None], 0.0, reward))

        c = self.config(objective="dapo", ppo_epochs=2, zero_std="resample", kl_beta=0.0)
        inner, policy = rewards(c, judge()), fill_policy(seed=1, scale=3.0)
        self.later_gradient(policy, "alone/resample", c, self.texts(c), equal_on_a_rank)
        c = self.config(zero_std="drop", kl_beta=0.0)
        policy, data, empty_steps = fill_policy(seed=1, scale=3.0), self.texts(c), []
        for step, different in enumerate((dist.rank == 1, False)):
            def scorer(rollouts, different=different):
                return Scored(inner(rollouts).reward * different)

            empty_steps.append(grpo_step(policy, None, scorer, data, c, step, dist=dist)["empty_steps"])
        self.result["alone/empty_steps"] = torch.tensor(empty_steps)

    def supervised(self):
        policy = model(seed=1, scale=1.0)
        start, optimizers, data = weights(policy), build_optimizers(policy, PretrainConfig()), self.texts(self.config())
        for step in range(10):
            parts = [unpack_batch(data.batch("train", step, micro), "cpu")
                     for micro in range(self.cut["gradient_accumulation_steps"])]
            training_step(policy, parts, optimizers, 1.0, dist)
        self.result["supervised"] = weights(policy) - start


def bad_steps(out_dir):
    """Steps of two ranks, of which rank 1 alone has a number that is not finite: {case: facts} of this rank."""
    bad, result = torch.nan if dist.rank == 1 else 1.0, {}
    layout = Layout(2, 1)

    def reward_of(value):
        """A rewards object: random, but on rank 1 this value for the first completion."""
        def scored(rollouts):
            x = torch.rand(rollouts.problems, 4, generator=torch.Generator().manual_seed(dist.rank))
            x[0, 0] = value if dist.rank == 1 else x[0, 0]
            return Scored(x)
        return scored

    def step(name, policy, value=0.5):
        c, before = layout.config(grad_clip=1.0, kl_beta=0.0), weights(policy).clone()
        metrics = grpo_step(policy, None, reward_of(value), layout.texts(c), c, dist=dist)
        result[name] = {"moved": not torch.equal(before, weights(policy)), "skipped_steps": metrics["skipped_steps"]}

    step("nothing", fill_policy())
    step("reward", fill_policy(), -torch.inf)
    policy = fill_policy()
    next(policy.model.parameters()).register_hook(lambda gradient: gradient * bad)
    step("gradient", policy)
    policy = fill_policy()
    project = policy.model.project
    policy.model.project = lambda h: project(h) * (bad if torch.is_grad_enabled() else 1.0)
    step("loss", policy)

    class OnceBad:
        state = SimpleNamespace(global_step=0)

        def __call__(self, rollouts):
            return reward_of(torch.inf if self.state.global_step == 2 else 0.5)(rollouts)

    # A whole run whose second of three iterations has a bad reward
    c = layout.config(max_iters=6, minibatches=2, kl_beta=0.0, out_dir=out_dir, save_interval=1, **RARELY)
    trainer = GRPOTrainer(fill_policy(), None, OnceBad(), layout.texts(c), no_evaluation, c,
                          create_logger(c, dist, 6, ("loss",)), dist)
    trainer.run()
    names = "skipped_steps", "step", "iteration"
    return result | {"run": {name: getattr(trainer, name) for name in names} | {"weights": weights(trainer.policy)}}


dataset, prompts, out, *layouts = sys.argv[1:]
dist = Distributed("cpu", "float32")
for name in layouts:
    layout = Layout(*map(int, name.split("x")))
    for part in (layout.several_steps, layout.later_steps, layout.groups_on_one_rank, layout.supervised):
        part()
    torch.save(layout.result, f"{out}-{name}-{dist.rank}.pt")
if dist.world > 1:
    torch.save(bad_steps(f"{out}-run"), f"{out}-bad-{dist.rank}.pt")
dist.close()
threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]  # where there is such a folder
assert not any("gloo" in name for name in threads), "a thread that outlives Python can abort the process as it ends"
