"""The GRPO step: its first ratio, what it changes, its phases and how often it runs them."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from core.optim import build_optimizers
from grpo.losses import OBJECTIVES, policy_loss, token_weights
from grpo.policies.fill_views import FILL_ESTIMATORS
from grpo.rewards import Scored
from tests.tiny import (
    Catcher,
    causal_policy,
    collect,
    config,
    consumer,
    count_rows,
    fill_policy,
    fixed_rewards,
    flat_gradient,
    grpo_step,
    judge,
    length_reward,
    prompt_config,
    prompt_consumer,
    rewards,
    train,
)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_first_ratio_is_exactly_one_and_the_kl_exactly_zero(dataset, top_p, accumulate):
    c = config(top_p=top_p, gradient_accumulation_steps=accumulate, temperature=0.8)
    policy = fill_policy(dropout=0.5)  # a dropout that was left on would show
    metrics = grpo_step(policy, policy.frozen(), rewards(c, judge()), consumer(dataset, c), c)
    assert metrics["ratio_minus_one"] == 0 and metrics["mean_kl"] == 0 and metrics["clip_fraction"] == 0
    assert abs(metrics["mean_advantage"]) < 1e-5 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("estimator", ["k3", "exact"])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}])
def test_on_prompts_the_first_ratio_is_one_and_the_kl_zero(prompts, estimator, truncation):
    policy, c = causal_policy(dropout=0.5), prompt_config(temperature=0.8, kl_estimator=estimator, **truncation)
    metrics = grpo_step(policy, policy.frozen(), length_reward, prompt_consumer(prompts, c), c)
    assert metrics["mean_kl"] == 0 and metrics["clip_fraction"] == 0
    assert metrics["ratio_minus_one"] < 1e-5, "the sampler with its cache and the scorer agree"


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("estimator", FILL_ESTIMATORS)
def test_the_first_ratio_is_one_for_every_estimator_of_several_passes(dataset, S, estimator):
    c, policy = config(unmask_steps=S, fill_estimator=estimator), fill_policy()
    data = consumer(dataset, c)
    metrics = grpo_step(policy, policy.frozen(), rewards(c, judge()), data, c)
    assert metrics["clip_fraction"] == 0 and metrics["kl_to_old"] == 0 and metrics["mean_kl"] == 0
    assert metrics["grad_norm"] > 0
    if estimator == "trajectory" or S == 1 and estimator == "one_step":
        assert metrics["ratio_minus_one"] < 1e-4
    epochs = dataclasses.replace(c, ppo_epochs=2, kl_beta=0.0)
    rollouts = collect(policy, fixed_rewards(torch.rand(4, 4)), data, epochs)[0]
    assert torch.equal(policy.score(rollouts, 1.0).logp, rollouts.proximal_logp)


def test_each_distinct_input_is_read_once(dataset):
    c, policy, scorer = config(group_size=6), fill_policy(), judge()
    reference = fill_policy(seed=2).frozen()
    rows, reference_rows, judge_rows = map(count_rows, (policy.model, reference.model, scorer))
    grpo_step(policy, reference, rewards(c, scorer), consumer(dataset, c), c)
    assert sum(rows) == 2 * c.batch_size, "once to sample, once to train: not once per completion"
    assert sum(reference_rows) == c.batch_size
    assert sum(judge_rows) == c.batch_size * c.group_size


# What a step changes

def test_a_step_leaves_the_global_random_states_alone(dataset, prompts):
    fill, causal, scorer = fill_policy(dropout=0.5), causal_policy(dropout=0.5), judge()
    passes, completes = config(unmask_steps=3), prompt_config(ppo_epochs=2)
    states = lambda: [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]
    before = states()
    grpo_step(fill, fill.frozen(), rewards(passes, scorer), consumer(dataset, passes), passes)
    grpo_step(causal, causal.frozen(), length_reward, prompt_consumer(prompts, completes), completes)
    assert states() == before


def test_the_stop_token_is_trained(prompts):
    """The reward is to be short: a policy whose stop token had no gradient could not learn it."""
    c = prompt_config(kl_beta=0.0, learning_rate=3e-2, batch_size=8)
    policy, data, lengths = causal_policy(scale=1.0), prompt_consumer(prompts, c), []
    optimizers, brief = build_optimizers(policy, c), lambda rollouts: Scored(-length_reward(rollouts).reward)
    for number in range(60):
        lengths.append(grpo_step(policy, None, brief, data, c, number, optimizers)["completion_length"])
    assert lengths[0] > 5 and np.mean(lengths[-5:]) < 2


def samples_with_errors(policy, off):
    """The policy's sampler reports log-probabilities that are lower by off(rollouts), (N, M), than its own."""
    sample = policy.sample

    def sample_with_errors(problems, iteration, config):
        rollouts = sample(problems, iteration, config)
        return dataclasses.replace(rollouts, old_logp=rollouts.old_logp - off(rollouts) * rollouts.mask)

    policy.sample = sample_with_errors
    return policy


@pytest.mark.parametrize("kind", ["fill", "prompts"])
def test_the_first_ratio_is_one_whoever_sampled(dataset, prompts, kind):
    """The clipped ratio starts from the policy before the step."""
    off = lambda rollouts: torch.randn_like(rollouts.mask) * 0.3
    if kind == "fill":
        c, policy = config(ppo_epochs=2, kl_beta=0.0), samples_with_errors(fill_policy(), off)
        data, reward = consumer(dataset, c), fixed_rewards(torch.rand(4, 4))
    else:
        c = prompt_config(ppo_epochs=2, kl_beta=0.0)
        policy, data, reward = samples_with_errors(causal_policy(), off), prompt_consumer(prompts, c), length_reward
    rollouts, sums = collect(policy, reward, data, c)
    assert torch.equal(policy.score(rollouts, c.temperature).logp, rollouts.proximal_logp)
    metrics = train(policy, rollouts, sums, c)
    assert metrics["clip_fraction"] == 0 and metrics["kl_to_old"] == 0 and metrics["mismatch_kl"] > 0.01


def test_the_expected_gradient_with_the_ratio_to_the_sampler_is_the_policys():
    """Over all tokens that the sampler can write, each with its probability there: without a bound on the ratio the
    gradient is that of the expected advantage under the policy."""
    g = torch.Generator().manual_seed(4)
    theta, q, A = (torch.randn(7, dtype=torch.float64, generator=g) for _ in range(3))
    theta.requires_grad_()
    p, q = theta.log_softmax(0), q.log_softmax(0)
    unbounded = dataclasses.replace(OBJECTIVES["rloo"], clip_low=1.0, clip_high=1e9)
    loss, *_ = policy_loss(p[:, None], q[:, None], A[:, None], q.exp()[:, None], unbounded)
    found, = torch.autograd.grad(-loss, theta)
    expected, = torch.autograd.grad((theta.softmax(0) * A).sum(), theta)
    torch.testing.assert_close(found, expected)


def test_the_ratio_to_the_sampler_is_clipped_and_no_pass_scores_before_the_step(prompts):
    """All ratios are 1.5, above the range: completions above their group's mean lose their gradient, the others count
    one and a half times."""
    c = prompt_config(kl_beta=0.0, max_staleness=1, ratio_to="sampler")
    data, plain = prompt_consumer(prompts, c), causal_policy(scale=3.0)
    policy = samples_with_errors(causal_policy(scale=3.0), lambda _: math.log(1.5))
    catcher = Catcher(policy)
    metrics = grpo_step(policy, None, length_reward, data, c, optimizers=[catcher])
    assert metrics["ratio_mean"] == pytest.approx(1.5, rel=1e-4) and "time/rescore" not in metrics
    rollouts, _ = collect(plain, length_reward, data, dataclasses.replace(c, ratio_to="policy"))
    weight = token_weights(rollouts.mask, "sequence", c.max_new_tokens)
    logp = plain.score(rollouts, c.temperature).logp
    (-1.5 * (logp * rollouts.advantage.clamp(max=0) * weight).sum()).backward()
    expected = flat_gradient(plain)
    torch.testing.assert_close(catcher.gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert 0 < metrics["clip_fraction"] < 1
