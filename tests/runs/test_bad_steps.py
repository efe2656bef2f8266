"""A step with a number that is not finite, in sampling, rewards, loss or gradient, is skipped, counted and named."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from core.optim import build_optimizers
from grpo.reward_functions.registry import reward
from grpo.rewards import Rewards
from tests.tiny import (
    causal_policy, config, consumer, fill_policy, grpo_step, judge, optimizer_state, prompt_config, prompt_consumer,
    rewards)
from tests.trainers import run, trainer, training_records

NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("without_pictures")


def damaged(net, value=NAN):
    """A model whose states are not finite."""
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(value)
    return net


def skipped(policy, reference, scorer, data, c):
    """The metrics of a step that must be skipped; it moves neither the weights nor the optimizers."""
    optimizers = build_optimizers(policy, c)
    before = {name: p.clone() for name, p in policy.weights().items()}
    metrics = grpo_step(policy, reference, scorer, data, c, optimizers=optimizers)
    assert metrics["skipped_steps"] == 1 and metrics["empty_steps"] == 0
    assert all(torch.equal(p, before[name]) or p.isnan().all() for name, p in policy.weights().items())
    assert not optimizer_state(optimizers)
    return metrics


@pytest.mark.parametrize("settings, value", [
    ({}, NAN), ({"top_p": 0.9}, INF), ({"unmask_steps": 3}, INF)], ids=str)
@pytest.mark.parametrize("kind", ["fill", "causal"])
def test_a_policy_that_is_not_finite_samples_a_bad_step(dataset, prompts, kind, settings, value):
    if kind == "fill":
        c = config(**settings)
        policy, reference, scorer, data = fill_policy(), fill_policy(), rewards(c, judge()), consumer(dataset, c)
    else:
        c = prompt_config(**settings)
        policy, reference, scorer, data = causal_policy(), causal_policy(), Rewards(c), prompt_consumer(prompts, c)
    damaged(policy.model, value)
    assert skipped(policy, reference.frozen(), scorer, data, c)["bad_rollouts"] == 1


@pytest.mark.parametrize("settings, bad", [
    ({}, -INF), ({"zero_std": "drop"}, INF), ({"zero_std": "resample"}, NAN), ({"reward_normalisation": "group"}, INF),
    ({"train_pass_k": 2}, NAN)], ids=str)
def test_a_reward_that_is_not_finite_makes_a_bad_step(prompts, settings, bad):
    @reward(0, 100)
    def lengths(completions):
        return [bad if i == 5 else float(len(text)) for i, text in enumerate(completions)]

    c = prompt_config(reward_functions=("lengths", "length_penalty"), kl_beta=0.0, **settings)
    metrics = skipped(causal_policy(), None, Rewards(c), prompt_consumer(prompts, c), c)
    assert metrics["bad_rollouts"] == 1


# Whole runs

class Judged:
    """A rewards object: that of a judge, but at given steps the first completion's reward is infinite."""

    def __init__(self, steps):
        self.inner, self.state, self.steps = rewards(config(), judge()), SimpleNamespace(global_step=0), steps

    def __call__(self, rollouts):
        scored = self.inner(rollouts)
        if self.state.global_step not in self.steps:
            return scored
        reward, values = scored.reward.clone(), scored.values["judge"].clone()
        reward[0, 0] = values[0] = INF
        return dataclasses.replace(scored, reward=reward, credit=reward[..., None], values={"judge": values})


def bad_at(steps, dataset, out_dir, **settings):
    """A trainer of a fill-in policy; at these steps one reward is not finite."""
    return trainer(dataset, out_dir, Judged(steps), **{"save_interval": 1, "max_iters": 6, "learning_rate": 1e-3,
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


def test_too_many_bad_steps_end_the_run_at_its_last_good_state(dataset, tmp_path):
    t = bad_at(range(2, 99), dataset, tmp_path, max_iters=50, max_bad_steps=3)
    with pytest.raises(ValueError) as error:
        t.run()
    assert all(word in str(error.value) for word in ("max_bad_steps", "learning_rate", f"{tmp_path}/state.pt"))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 2 and state["skipped_steps"] == 0, "no state is saved among bad steps"


def test_a_good_step_ends_the_row_of_bad_ones_and_its_state_is_saved(dataset, tmp_path):
    t, saved = bad_at((1, 2, 4, 5), dataset, tmp_path, max_iters=7, max_bad_steps=3), []
    save = t.save
    t.save = lambda: (saved.append(t.step), save())
    t.run()
    assert saved == [1, 4, 7] and t.skipped_steps == 4
