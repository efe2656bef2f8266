"""The first ratio is 1 and the first KL 0: sampler and scorer read one distribution. A mismatch is measured."""

import dataclasses
import math

import pytest
import torch

from grpo.losses import token_weights
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
    sampled,
    train,
)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_in_fill_in_the_first_ratio_is_exactly_one_and_the_kl_exactly_zero(dataset, top_p, accumulate):
    c = config(top_p=top_p, gradient_accumulation_steps=accumulate, temperature=0.8)
    policy = fill_policy(dropout=0.5)  # a dropout that was left on would show
    metrics = grpo_step(policy, policy.frozen(), rewards(c, judge()), consumer(dataset, c), c)
    assert metrics["ratio_minus_one"] == metrics["mean_kl"] == metrics["clip_fraction"] == 0
    assert abs(metrics["mean_advantage"]) < 1e-5 and metrics["grad_norm"] > 0


@pytest.mark.parametrize("estimator", ["k3", "exact"])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}])
def test_on_prompts_the_first_ratio_is_one_and_the_kl_exactly_zero(prompts, estimator, truncation):
    policy, c = causal_policy(dropout=0.5), prompt_config(temperature=0.8, kl_estimator=estimator, **truncation)
    metrics = grpo_step(policy, policy.frozen(), length_reward, prompt_consumer(prompts, c), c)
    assert metrics["mean_kl"] == metrics["clip_fraction"] == 0
    assert metrics["ratio_minus_one"] < 1e-5, "the sampler with its cache and the scorer agree"


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("estimator", ["trajectory", "one_step"])
def test_in_several_passes_the_first_ratio_is_one(dataset, S, estimator):
    c, policy = config(unmask_steps=S, fill_estimator=estimator), fill_policy()
    metrics = grpo_step(policy, policy.frozen(), rewards(c, judge()), consumer(dataset, c), c)
    assert metrics["clip_fraction"] == metrics["kl_to_old"] == metrics["mean_kl"] == 0 < metrics["grad_norm"]
    assert (metrics["ratio_minus_one"] < 1e-4) == (estimator == "trajectory" or S == 1)


@pytest.mark.parametrize("S", [1, 2, 5])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_the_trajectory_scores_the_probability_of_what_was_sampled(dataset, S, top_p):
    c, policy = config(unmask_steps=S, top_p=top_p, temperature=0.7), fill_policy()
    rollouts = sampled(policy, dataset, c)
    logp = policy.score(rollouts, c.temperature).logp
    torch.testing.assert_close(logp * rollouts.mask, rollouts.old_logp * rollouts.mask, rtol=1e-4, atol=1e-4)


# A sampler that differs from the policy

def samples_with_errors(policy, off):
    """The policy's sampler reports log-probabilities that are lower by off(rollouts), (N, M), than its own."""
    sample = policy.sample

    def sample_with_errors(problems, iteration, config):
        rollouts = sample(problems, iteration, config)
        return dataclasses.replace(rollouts, old_logp=rollouts.old_logp - off(rollouts) * rollouts.mask)

    policy.sample = sample_with_errors
    return policy


@pytest.mark.parametrize("kind", ["fill", "prompts"])
def test_the_clipped_ratio_starts_from_the_policy_whoever_sampled(dataset, prompts, kind):
    def off(rollouts):
        return torch.randn_like(rollouts.mask) * 0.3

    c = prompt_config(ppo_epochs=2, kl_beta=0.0)
    policy, data = samples_with_errors(causal_policy(), off), prompt_consumer(prompts, c)
    if kind == "fill":
        policy, data = samples_with_errors(fill_policy(), off), consumer(dataset, c)
    rollouts, sums = collect(policy, fixed_rewards(torch.rand(4, 4)), data, c)
    assert torch.equal(policy.score(rollouts, c.temperature).logp, rollouts.proximal_logp)
    metrics = train(policy, rollouts, sums, c)
    assert metrics["clip_fraction"] == metrics["kl_to_old"] == 0 and metrics["mismatch_kl"] > 0.01


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


@pytest.mark.parametrize("again", [{}, {"minibatches": 2}])
def test_the_mismatch_is_that_of_the_whole_step(prompts, again):
    """One token of one micro-batch is off by more than all others, and one that the loss does not see by still more."""
    c = prompt_config(kl_beta=0.0, batch_size=2, gradient_accumulation_steps=3, mask_truncated=True, **again)
    policy, seen = causal_policy(), {}
    sample = policy.sample

    def sampled_with_errors(problems, iteration, config):
        rollouts = sample(problems, iteration, config)
        off = torch.linspace(-0.5, 0.1, rollouts.mask.numel()).view_as(rollouts.mask) * rollouts.mask
        off[5, 0], off[9, 0] = 2.0, 9.0
        truncated = torch.arange(len(off)) == 9
        seen["off"] = off[(rollouts.mask > 0) & ~truncated[:, None]].double()
        return dataclasses.replace(rollouts, old_logp=rollouts.old_logp - off, truncated=truncated)

    policy.sample = sampled_with_errors
    rollouts, sums = collect(policy, fixed_rewards(torch.rand(6, 4)), prompt_consumer(prompts, c), c)
    metrics, off = train(policy, rollouts, sums, c), seen["off"]
    assert len(off) == int(rollouts.train_mask.sum())
    expected = {"mismatch_max": 2, "mismatch_kl": (off.exp() - off - 1).mean(),
                "ratio_minus_one": (off.exp() - 1).abs().mean(),
                "effective_sample_size": off.exp().sum() ** 2 / off.exp().square().sum() / len(off)}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-3), name


@pytest.mark.parametrize("off", [100, -100])
def test_a_mismatch_is_finite_however_far_apart_sampler_and_policy_are(dataset, off):
    c, policy = config(kl_beta=0.0), samples_with_errors(fill_policy(), lambda _: off)
    metrics = grpo_step(policy, None, fixed_rewards(torch.rand(4, 4)), consumer(dataset, c), c)
    assert metrics["mismatch_max"] == 20 and metrics["effective_sample_size"] == pytest.approx(1.0)
    assert math.isfinite(metrics["mismatch_kl"]) and math.isfinite(metrics["ratio_minus_one"])


def test_a_sampler_far_from_the_policy_ends_the_run_but_an_estimate_does_not(dataset):
    """one_step does not give the probability of what was sampled, though sampler and policy are the same."""
    policy = fill_policy(seed=1, scale=25.0)
    for estimator in ("trajectory", "one_step"):
        c = config(sampler="ray", fill_estimator=estimator, unmask_steps=4, kl_beta=0.0)
        metrics = grpo_step(policy, None, fixed_rewards(torch.rand(4, 4)), consumer(dataset, c), c)
        assert (metrics["mismatch_kl"] > 0.2) == (estimator == "one_step")
    c = config(sampler="ray", kl_beta=0.0)
    policy = samples_with_errors(fill_policy(), lambda _: 1.0)
    with pytest.raises(ValueError, match="mismatch_kl"):
        grpo_step(policy, None, fixed_rewards(torch.rand(4, 4)), consumer(dataset, c), c)
