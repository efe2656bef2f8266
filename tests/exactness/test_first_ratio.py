"""The first ratio is 1 and the first KL 0: sampler and scorer read one distribution. A mismatch is measured."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from core.errors import Mistake
from grpo.losses import OBJECTIVES, policy_loss, token_weights
from grpo.rollout import DataBuffer
from tests.tiny import (
    Catcher,
    causal_policy,
    collect,
    config,
    consumer,
    fill_policy,
    fixed_rewards,
    flat_gradient,
    grpo_step,
    judge,
    length_reward,
    prompt_config,
    prompt_consumer,
    rewards,
    same,
    train,
)


@pytest.mark.parametrize("kind, settings", [
    ("fill", {}), ("fill", {"top_p": 0.9, "gradient_accumulation_steps": 3}),
    ("fill", {"unmask_steps": 3, "top_p": 0.8}), ("fill", {"unmask_steps": 3, "fill_estimator": "one_step"}),
    ("prompts", {"kl_estimator": "k3", "top_p": 0.9}), ("prompts", {"kl_estimator": "exact"})], ids=str)
def test_the_first_ratio_is_one_and_the_first_kl_exactly_zero(dataset, prompts, kind, settings):
    c = prompt_config(temperature=0.8, **settings)
    policy, data = causal_policy(dropout=0.5), prompt_consumer(prompts, c)  # a dropout that was left on would show
    if kind == "fill":
        policy, data = fill_policy(dropout=0.5), consumer(dataset, c)
    metrics = grpo_step(policy, policy.frozen(), fixed_rewards(torch.rand(12, 4)), data, c)
    assert metrics["clip_fraction"] == metrics["kl_to_old"] == metrics["mean_kl"] == 0 < metrics["grad_norm"]
    exact = kind == "fill" and "unmask_steps" not in settings
    sampler_agrees = metrics["ratio_minus_one"] <= (0 if exact else 1e-4)
    assert sampler_agrees == ("fill_estimator" not in settings)


# A sampler that differs from the policy

def samples_with_errors(policy, off):
    """The policy's sampler reports log-probabilities that are lower by off(rollouts), (N, M), than its own."""
    sample = policy.sample

    def sample_with_errors(problems, iteration, config):
        rollouts = sample(problems, iteration, config)
        return dataclasses.replace(rollouts, old_logp=rollouts.old_logp - off(rollouts) * rollouts.mask)

    policy.sample = sample_with_errors
    return policy


def test_the_clipped_ratio_starts_from_the_policy_whoever_sampled(prompts):
    c = prompt_config(ppo_epochs=2, kl_beta=0.0)
    policy = samples_with_errors(causal_policy(), lambda rollouts: torch.randn_like(rollouts.mask) * 0.3)
    rollouts, sums = collect(policy, fixed_rewards(torch.rand(4, 4)), prompt_consumer(prompts, c), c)
    assert torch.equal(policy.score(rollouts, c.temperature).logp, rollouts.proximal_logp)
    metrics = train(policy, rollouts, sums, c)
    assert metrics["clip_fraction"] == metrics["kl_to_old"] == 0 and metrics["mismatch_kl"] > 0.01


def test_the_expected_gradient_with_the_ratio_to_the_sampler_is_the_policys():
    """Over all tokens that the sampler can write: without a bound on the ratio it is unbiased."""
    theta, q, advantage = torch.randn(3, 7, dtype=torch.float64)
    theta.requires_grad_()
    p, q = theta.log_softmax(0), q.log_softmax(0)
    unbounded = dataclasses.replace(OBJECTIVES["rloo"], clip_low=1.0, clip_high=1e9)
    loss, *_ = policy_loss(p[:, None], q[:, None], advantage[:, None], q.exp()[:, None], unbounded)
    found, = torch.autograd.grad(-loss, theta)
    expected, = torch.autograd.grad((theta.softmax(0) * advantage).sum(), theta)
    torch.testing.assert_close(found, expected)


def test_the_ratio_to_the_sampler_is_clipped_and_no_pass_scores_before_the_step(prompts):
    """All ratios are 1.5, above the range: completions above their group's mean lose their gradient, the others count
    one and a half times."""
    c = prompt_config(kl_beta=0.0, max_staleness=1, ratio_to="sampler")
    data, plain = prompt_consumer(prompts, c), causal_policy(scale=3.0)
    policy = samples_with_errors(causal_policy(scale=3.0), lambda _: math.log(1.5))
    catcher = Catcher(policy)
    metrics = grpo_step(policy, None, length_reward, data, c, optimizers=[catcher])
    assert 0 < metrics["clip_fraction"] < 1 and "time/rescore" not in metrics
    assert metrics["ratio_minus_one"] == pytest.approx(0.5, rel=1e-4)
    rollouts, _ = collect(plain, length_reward, data, dataclasses.replace(c, ratio_to="policy"))
    weight = token_weights(rollouts.mask, "sequence", c.max_new_tokens)
    logp = plain.score(rollouts, c.temperature).logp
    (-1.5 * (logp * rollouts.advantage.clamp(max=0) * weight).sum()).backward()
    expected = flat_gradient(plain)
    torch.testing.assert_close(catcher.gradient, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_the_mismatch_is_that_of_the_whole_step(prompts):
    """One token of one micro-batch is off by more than all others, and one that the loss does not see by still more."""
    c = prompt_config(kl_beta=0.0, batch_size=2, gradient_accumulation_steps=3, mask_truncated=True)
    seen = {}

    def off_by(rollouts):
        off = torch.linspace(-0.5, 0.1, rollouts.mask.numel()).view_as(rollouts.mask) * rollouts.mask
        off[5, 0], off[9, 0] = 2.0, 9.0
        rollouts.truncated[:] = torch.arange(len(off)) == 9
        seen["off"] = off[(rollouts.mask > 0) & ~rollouts.truncated[:, None]].double()
        return off

    policy = samples_with_errors(causal_policy(), off_by)
    rollouts, sums = collect(policy, fixed_rewards(torch.rand(6, 4)), prompt_consumer(prompts, c), c)
    metrics, off = train(policy, rollouts, sums, c), seen["off"]
    assert len(off) == int(rollouts.train_mask.sum())
    expected = {"mismatch_max": 2, "mismatch_kl": (off.exp() - off - 1).mean(),
                "ratio_minus_one": (off.exp() - 1).abs().mean(),
                "effective_sample_size": off.exp().sum() ** 2 / off.exp().square().sum() / len(off)}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-3), name


def test_a_sampler_of_other_processes_that_is_far_from_the_policy_ends_the_run(dataset):
    c, policy = config(sampler="ray", kl_beta=0.0), samples_with_errors(fill_policy(), lambda _: 1.0)
    with pytest.raises(Mistake, match="mismatch_kl"):
        grpo_step(policy, None, fixed_rewards(torch.rand(4, 4)), consumer(dataset, c), c)


def test_a_step_leaves_the_global_random_states_alone(dataset, prompts):
    def states():
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()

    fill, causal, scorer = fill_policy(dropout=0.5), causal_policy(dropout=0.5), judge()
    passes, completes = config(unmask_steps=3), prompt_config(ppo_epochs=2)
    before = states()
    grpo_step(fill, fill.frozen(), rewards(passes, scorer), consumer(dataset, passes), passes)
    data = prompt_consumer(prompts, completes)
    grpo_step(causal, causal.frozen(), length_reward, data, completes, buffer=DataBuffer())
    assert states() == before


def test_a_larger_kl_beta_keeps_the_policy_nearer_and_frozen_models_stay_to_the_last_bit(dataset):
    kl = []
    for kl_beta in (0.01, 1.0):
        c = config(kl_beta=kl_beta)
        policy, scorer = fill_policy(), judge()
        reference = policy.frozen()
        for number in range(6):
            metrics = grpo_step(policy, reference, rewards(c, scorer), consumer(dataset, c), c, number)
        kl.append(metrics["mean_kl"])
        assert same(scorer, judge()) and same(reference, fill_policy()) and not same(policy, reference)
    assert 0 < kl[1] < kl[0]
