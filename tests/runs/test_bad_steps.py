"""A step with a number that is not finite, in sampling, rewards, loss or gradient, is skipped, counted and named."""

from types import SimpleNamespace

import pytest
import torch

from core.optim import build_optimizers
from grpo.reward_functions.registry import reward
from grpo.rewards import Rewards, Scored
from tests.tiny import (
    causal_policy, consumer, fill_policy, grpo_step, length_reward, optimizer_state, prompt_config, prompt_consumer)
from tests.trainers import run, trainer, training_records

NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("without_pictures")


def skipped(policy, reference, scorer, data, c):
    """Takes a step on rollouts that must be skipped; it moves neither the weights nor the optimizers."""
    optimizers = build_optimizers(policy, c)
    before = {name: p.clone() for name, p in policy.weights().items()}
    metrics = grpo_step(policy, reference, scorer, data, c, optimizers=optimizers)
    assert metrics["skipped_steps"] == metrics["bad_rollouts"] == 1 and metrics["empty_steps"] == 0
    assert all(torch.equal(p, before[name]) or p.isnan().all() for name, p in policy.weights().items())
    assert not optimizer_state(optimizers)


@pytest.mark.parametrize("kind, settings", [("fill", {"unmask_steps": 3}), ("fill", {"top_p": 0.9}), ("prompts", {})])
def test_a_policy_that_is_not_finite_samples_a_bad_step(dataset, prompts, kind, settings):
    c = prompt_config(**settings)
    policy, data = causal_policy(), prompt_consumer(prompts, c)
    if kind == "fill":
        policy, data = fill_policy(), consumer(dataset, c)
    reference = policy.frozen()
    with torch.no_grad():
        for p in policy.parameters():
            p.fill_(NAN)
    skipped(policy, reference, length_reward, data, c)


@pytest.mark.parametrize("settings, bad", [
    ({}, -INF), ({"zero_std": "resample"}, NAN), ({"reward_normalisation": "group"}, INF), ({"train_pass_k": 2}, NAN)],
    ids=str)
def test_a_reward_that_is_not_finite_makes_a_bad_step(prompts, settings, bad):
    @reward(0, 100)
    def lengths(completions):
        return [bad if i == 5 else float(len(text)) for i, text in enumerate(completions)]

    c = prompt_config(reward_functions=("lengths", "length_penalty"), kl_beta=0.0, **settings)
    skipped(causal_policy(), None, Rewards(c), prompt_consumer(prompts, c), c)


# Whole runs

class BadAt:
    """A rewards object: random, but at given steps the first completion's reward is infinite."""

    def __init__(self, steps):
        self.state, self.steps = SimpleNamespace(global_step=0), steps

    def __call__(self, rollouts):
        reward = torch.rand(rollouts.problems, 4)
        if self.state.global_step in self.steps:
            reward[0, 0] = INF
        return Scored(reward)


def bad_at(steps, dataset, out_dir, **settings):
    """A trainer of a fill-in policy; at these steps one reward is not finite."""
    return trainer(dataset, out_dir, BadAt(steps), **{"save_interval": 1, "max_iters": 6, "learning_rate": 1e-3,
                                                       "min_lr": 1e-3, "lr_decay_iters": 6} | settings)


def test_a_bad_step_moves_nothing_is_counted_and_named(dataset, tmp_path, capsys):
    t, weights = bad_at((2,), dataset, tmp_path), []
    inner = t.train_step
    t.train_step = lambda: (inner(), weights.append({k: v.clone() for k, v in t.policy.weights().items()}))[0]
    t.run()
    moved = [any(not torch.equal(a[k], b[k]) for k in a) for a, b in zip(weights, weights[1:])]
    assert moved == [True, False, True, True, True]
    records = training_records(tmp_path)
    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 1, 1, 1]
    assert [r["mean_reward"] is None for r in records] == [False, False, True, False, False, False]
    shown, = [line for line in capsys.readouterr().out.split("\n") if "is skipped" in line]
    assert "step 3" in shown and "mean_reward" in shown


def test_rollouts_with_a_bad_reward_cost_one_step(dataset, tmp_path):
    """All eight minibatches would be skipped, more than max_bad_steps."""
    t = run(bad_at((8,), dataset, tmp_path, ppo_epochs=4, minibatches=2, max_iters=11, max_bad_steps=2))
    steps = [r["step"] for r in training_records(tmp_path) if "time/collect" in r]
    assert steps == [1, 9, 10] and t.skipped_steps == 1
