"""The metrics of a step: sums against loops, and means over the tokens that they describe."""

import dataclasses
import math

import pytest
import torch

from grpo.grpo_training_step import differ
from grpo.rewards import Scored
from grpo.step_metrics import (LARGEST, add_up, discriminative_sums, logged_sums, nonfinite_rewards, rollout_sums,
                               unique_completions)
from tests.tiny import (causal_policy, collect, config, consumer, fill_policy, fixed_rewards, prompt_consumer, sampled,
                        train, undocumented)


def test_unique_completions_by_hand():
    target = torch.tensor([[1, 2], [1, 2], [1, 3], [4, 9], [4, 8], [5, 0], [5, 0], [5, 7], [5, 7]])
    mask = torch.tensor([[1.0, 1], [1, 1], [1, 1], [1, 0], [1, 0], [1, 0], [1, 1], [1, 0], [1, 0]])
    assert unique_completions(target, mask, 3).tolist() == [2, 2, 2], "a token 0 is not padding"


def test_discriminative_metrics_are_the_pairwise_auc():
    score = torch.tensor([[0.9, 0.1, 0.5, 0.5], [0.2, 0.3, 0.4, 0.1]])
    reward = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.5, 0.5, math.nan, 0.0]])
    pairs = [(s[i], s[j]) for s, r in zip(score.tolist(), reward.tolist(), strict=True)
             for i in range(4) for j in range(4) if r[i] > r[j]]
    sums = discriminative_sums(score, reward)
    assert sums["pairs"] == len(pairs) == 6
    assert sums["ranked"] == sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)
    assert abs(float(sums["margin"]) - sum(a - b for a, b in pairs)) < 1e-6
    assert sums["above"] == 4


@pytest.mark.parametrize("value", [0.1, 0.3, 1 / 3, 0.7, 0.9])
def test_equal_rewards_are_not_above_their_mean(value):
    for G in range(4, 17):
        reward = torch.full((3, G), value)
        reward[1, 0], reward[2, 1] = value + 0.5, math.nan
        assert discriminative_sums(torch.rand(3, G), reward)["above"] == 1, G


def test_a_mean_of_nothing_is_left_out(dataset):
    """Nothing of the step is in the loss, so its entropy and its ratios were not measured: they are not 0."""
    c, policy = config(objective="dr_grpo"), fill_policy()
    experience = collect(policy, fixed_rewards(torch.full((4, 4), math.nan)), consumer(dataset, c), c)
    metrics = train(policy, experience, c)
    assert metrics["empty_steps"] == 1 and metrics["skipped_samples"] == 16 and metrics["unique_completions"] > 0
    assert not {"entropy", "mean_kl", "clip_fraction", "kl_to_old", "mean_advantage", "mean_reward", "std_reward",
                "mismatch_kl", "ratio_minus_one", "success_prob", "discriminative_score"} & metrics.keys()
    measured = train(policy, collect(policy, fixed_rewards(torch.rand(4, 4)), consumer(dataset, c), c), c)
    assert {"entropy", "clip_fraction", "mean_reward", "std_reward", "mismatch_kl"} <= measured.keys()


def test_the_sums_of_rollouts_by_hand(prompts):
    c = config(max_new_tokens=6, kl_beta=0.0)
    rollouts = sampled(causal_policy(), prompts, c)
    reward = torch.rand(4, 4)
    reward[0], reward[1, 2], reward[2] = math.nan, math.nan, 0.5
    value = torch.rand(16)
    value[3] = math.nan
    scored = Scored(reward, values={"mine": value})
    sums = rollout_sums(rollouts, scored, differ(reward), discriminative=True)
    groups = [[x for x in row if not math.isnan(x)] for row in reward.tolist()]
    assert (sums["completions"], sums["problems"], sums["scored"]) == (16, 4, 11)
    assert float(sums["reward"]) == pytest.approx(sum(map(sum, groups)), rel=1e-5)
    assert float(sums["std_reward"]) == pytest.approx(sum(torch.tensor(g).std().item() for g in groups[1:]), abs=1e-5)
    assert sums["frac_reward_zero_std"] == 2, "a group without a score and one of equal scores"
    written = [[(rollouts.target[n, m].item(), rollouts.old_logp[n, m].item()) for m in range(rollouts.target.shape[1])
                if rollouts.mask[n, m]] for n in range(16)]
    assert sums["tokens"] == sums["text_tokens"] == sum(map(len, written)) < rollouts.mask.numel()
    assert float(sums["log_prob"]) == pytest.approx(sum(p for row in written for _, p in row), rel=1e-4)
    ids = [tuple(token for token, _ in row) for row in written]
    assert sums["unique_completions"] == sum(len(set(ids[4 * i : 4 * i + 4])) for i in range(4))
    assert sums["count of reward/mine"] == 15
    assert float(sums["sum of reward/mine"]) == pytest.approx(float(value.nansum()))
    assert sums["sum of completion_length"] == sums["tokens"] and sums["count of completion_length"] == 16
    above = sum(x > sum(g) / len(g) for g in map(torch.tensor, groups) for x in g if g.min() < g.max())
    assert sums["above"] == above and sums["scored_problems"] == 3


def test_the_spread_of_large_rewards_is_a_finite_number(prompts):
    rollouts = sampled(causal_policy(), prompts, config(max_new_tokens=6, kl_beta=0.0))
    reward = torch.tensor([[2e19, -2e19, 2e19, -2e19]] * 4)
    found = float(rollout_sums(rollouts, Scored(reward), differ(reward))["std_reward"])
    assert found == pytest.approx(float(reward.double().std(1).sum()), rel=1e-5)


@pytest.mark.parametrize("settings", [{"zero_std": "drop"}, {"mask_truncated": True}, {"minibatches": 2}])
def test_means_are_over_the_tokens_that_they_describe(prompts, settings):
    objective = "grpo" if "zero_std" in settings else "reinforce++"
    c, policy = config(max_new_tokens=30, kl_beta=0.0, objective=objective, **settings), causal_policy(scale=3.0)
    reward = torch.rand(4, 4)
    reward[1:3] = 0.5
    experience = collect(policy, fixed_rewards(reward), prompt_consumer(prompts, c), c)
    rollouts, sums = experience.rollouts, experience.sums
    rollouts.old_logp -= 0.25 * rollouts.mask  # as if the sampler disagreed with the scorer
    metrics = train(policy, experience, c)
    trained = rollouts.train_mask > 0
    assert trained.any() and (settings.keys() == {"minibatches"} or trained.sum() < sums["tokens"])
    mean = float(rollouts.advantage.expand_as(rollouts.mask)[trained].mean())
    assert metrics["mean_advantage"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    if "minibatches" not in settings:
        assert metrics["ratio_minus_one"] == pytest.approx(math.exp(0.25) - 1, rel=1e-3)
        assert metrics["mismatch_kl"] == pytest.approx(math.exp(0.25) - 0.25 - 1, rel=1e-3)
        assert metrics["mismatch_max"] == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize("again", [{}, {"minibatches": 2}])
def test_the_largest_mismatch_is_that_of_the_whole_step(prompts, again):
    """One token of one micro-batch is off by more than all others, and one that the loss does not see by still more."""
    c = config(max_new_tokens=6, kl_beta=0.0, batch_size=2, gradient_accumulation_steps=3, **again)
    policy, seen = causal_policy(), {}
    sample = policy.sample

    def sampled_with_errors(problems, iteration, config):
        rollouts = sample(problems, iteration, config)
        off = torch.linspace(-0.5, 0.1, rollouts.mask.numel()).view_as(rollouts.mask) * rollouts.mask
        off[5, 0], off[9, 0] = 2.0, 9.0
        train_mask = rollouts.mask.clone()
        train_mask[9] = 0.0
        seen["off"] = off[train_mask > 0]
        return dataclasses.replace(rollouts, old_logp=rollouts.old_logp - off, train_mask=train_mask)

    policy.sample = sampled_with_errors
    experience = collect(policy, fixed_rewards(torch.rand(6, 4)), prompt_consumer(prompts, c), c)
    metrics, off = train(policy, experience, c), seen["off"].double()
    assert len(off) == int(experience.rollouts.train_mask.sum())
    assert metrics["mismatch_max"] == pytest.approx(2, rel=1e-4)
    assert metrics["ratio_max"] == pytest.approx(math.exp(2), rel=1e-4)
    assert metrics["ratio_min"] == pytest.approx(math.exp(-0.5), rel=1e-3)
    assert metrics["ratio_mean"] == pytest.approx(float(off.exp().mean()), rel=1e-4)
    assert metrics["mismatch_mean"] == pytest.approx(float(off.abs().mean()), rel=1e-4)
    size = off.exp().sum() ** 2 / off.exp().square().sum() / len(off)
    assert metrics["effective_sample_size"] == pytest.approx(float(size), rel=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx(float((off.exp() - off - 1).mean()), rel=1e-3)
    assert metrics["ratio_minus_one"] == pytest.approx(float((off.exp() - 1).abs().mean()), rel=1e-3)


def test_parts_of_a_step_add_up_and_of_a_largest_one_the_larger_counts():
    name = LARGEST[0]
    a, b = {"loss": 0.0, name: -math.inf}, {"loss": torch.tensor(2.0), name: torch.tensor(-1.0), "x": 1}
    found = add_up(add_up(a, b), {"loss": torch.tensor(5.0), name: torch.tensor(-3.0)})
    assert found == {"loss": 7.0, name: -1.0}


@pytest.mark.parametrize("name", ["lr", "kl_beta", "step", "tokens_per_second", "time/train", "loss"])
def test_a_reward_may_not_log_under_the_name_of_a_metric_of_training(prompts, name):
    c = config(max_new_tokens=6, kl_beta=0.0)
    experience = collect(policy := causal_policy(), fixed_rewards(torch.rand(c.batch_size, c.group_size)),
                         prompt_consumer(prompts, c), c)
    sums = logged_sums({"mine": (3.0, 2)}, ["mine"])
    assert train(policy, dataclasses.replace(experience, sums=experience.sums | sums), c)["mine"] == 1.5
    sums = logged_sums({name: (3.0, 2)}, [name])
    with pytest.raises(ValueError, match=f"log_metric.'{name}', ....: training has a metric of this name"):
        train(policy, dataclasses.replace(experience, sums=experience.sums | sums), c)


def test_every_metric_of_a_step_on_prompts_is_documented(prompts):
    c = config(overlong_buffer=4, max_new_tokens=6, kl_beta=0.0, objective="dr_grpo", zero_std="resample")
    policy, data = causal_policy(), prompt_consumer(prompts, c)
    metrics = train(policy, collect(policy, lambda r: Scored(torch.rand(r.problems, 4)), data, c), c)
    assert {"reward/overlong", "success_prob", "resampled", "empty_steps", "mismatch_kl",
            "mismatch_max"} <= metrics.keys()
    assert not undocumented(metrics.keys() - {"text_tokens", "bad_rollouts"})
    assert undocumented(["loss2", "eval/x"]), "the check finds what is missing"


def test_completions_with_a_reward_that_is_not_finite_are_counted_once():
    nan, inf = float("nan"), float("inf")
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    reward = torch.tensor([[1.0, inf], [nan, 2.0]])
    assert nonfinite_rewards(Scored(reward), mask) == 1, "NaN means that it was skipped"
    credit = torch.tensor([[[1.0, inf], [inf, inf]], [[nan, nan], [nan, 0.0]]])
    assert nonfinite_rewards(Scored(reward, credit), mask) == 2, "not on padding, and not of what was skipped"
    values = {"a": torch.tensor([1.0, inf, -inf, 1.0]), "b": torch.tensor([nan] * 4)}
    assert nonfinite_rewards(Scored(reward, credit, values), mask) == 3, "a reward may cancel in the sum"
    assert nonfinite_rewards(Scored(torch.rand(0, 4)), torch.zeros(0, 2)) == 0
