"""The metrics of a step: sums against loops, and means over the tokens that they describe."""

import math

import pytest
import torch

from grpo.grpo_training_step import differ
from grpo.rewards import Scored
from grpo.step_metrics import discriminative_sums, rollout_sums, unique_completions
from tests.tiny import causal_policy, collect, config, fixed_rewards, prompt_consumer, sampled, train, undocumented


def test_unique_completions_by_hand():
    target = torch.tensor([[1, 2], [1, 2], [1, 3], [4, 9], [4, 8], [5, 0]])
    mask = torch.tensor([[1.0, 1], [1, 1], [1, 1], [1, 0], [1, 0], [1, 0]])
    assert unique_completions(target, mask, 3).tolist() == [2, 2]


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
    assert sums["above"] == sum(x > sum(g) / len(g) for g in map(torch.tensor, groups) for x in g)


@pytest.mark.parametrize("settings", [{"zero_std": "drop"}, {"mask_truncated": True}, {"minibatches": 2}])
def test_means_are_over_the_tokens_that_they_describe(prompts, settings):
    c, policy = config(max_new_tokens=30, kl_beta=0.0, objective="reinforce++", **settings), causal_policy(scale=3.0)
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


def test_every_metric_of_a_step_on_prompts_is_documented(prompts):
    c = config(overlong_buffer=4, max_new_tokens=6, kl_beta=0.0, objective="dr_grpo", zero_std="resample")
    policy, data = causal_policy(), prompt_consumer(prompts, c)
    metrics = train(policy, collect(policy, lambda r: Scored(torch.rand(r.problems, 4)), data, c), c)
    assert {"reward/overlong", "success_prob", "resampled", "empty_steps"} <= metrics.keys()
    assert not undocumented(metrics.keys() - {"text_tokens"})
    assert undocumented(["loss2", "eval/x"]), "the check finds what is missing"
