"""The metrics of a step: sums against loops, and means over the tokens that they describe."""

import math

import pytest
import torch

from grpo.metrics import add_discriminative, add_rollouts
from grpo.sums import Sums
from grpo.rewards import Scored
from tests.tiny import (
    causal_policy, collect, config, consumer, fill_policy, fixed_rewards, pairs, sampled, train)

NAN = math.nan


def test_discriminative_metrics_are_the_pairwise_auc():
    score = torch.tensor([[0.9, 0.1, 0.5, 0.5], [0.2, 0.3, 0.4, 0.1]])
    reward = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.5, 0.5, NAN, 0.0]])
    pairs = [(s[i], s[j]) for s, r in zip(score.tolist(), reward.tolist(), strict=True)
             for i in range(4) for j in range(4) if r[i] > r[j]]
    sums = Sums()
    add_discriminative(sums, score, reward)
    found = {name: pair for (_, name), pair in sums.entries.items()}
    ranked, number = found["discriminative_score"]
    assert number == len(pairs) == 6
    assert ranked == sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)
    assert abs(float(found["discriminative_margin"][0]) - sum(a - b for a, b in pairs)) < 1e-6
    assert found["success_prob"] == (4, 7)
    reward = torch.full((3, 7), 0.1)  # equal rewards are not above their mean, whatever rounding does
    sums = Sums()
    add_discriminative(sums, torch.rand(3, 7), reward)
    assert sums.entries["mean", "success_prob"] == (0, 21)


def test_a_mean_of_nothing_is_left_out(dataset):
    """Nothing of the step is in the loss, so its entropy and its ratios were not measured: they are not 0."""
    c, policy = config(objective="dr_grpo"), fill_policy()
    metrics = train(policy, *collect(policy, fixed_rewards(torch.full((4, 4), NAN)), consumer(dataset, c), c), c)
    assert metrics["empty_steps"] == 1 and metrics["skipped_samples"] == 16 and metrics["unique_completions"] > 0
    assert not {"entropy", "mean_kl", "mean_advantage", "mean_reward", "mismatch_max"} & metrics.keys()


def test_the_sums_of_rollouts_by_hand(prompts):
    rollouts = sampled(causal_policy(), prompts, config(max_new_tokens=6, kl_beta=0.0))
    reward = torch.rand(4, 4)
    reward[0], reward[1, 2], reward[2] = NAN, NAN, 0.5
    value = torch.rand(16)
    value[3] = NAN
    scored = Scored(reward, values={"mine": value})
    parts = Sums()
    add_rollouts(parts, rollouts, scored)
    sums = pairs(parts)
    groups = [[x for x in row if not math.isnan(x)] for row in reward.tolist()]
    written = [[(rollouts.target[n, m].item(), rollouts.old_logp[n, m].item()) for m in range(rollouts.target.shape[1])
                if rollouts.mask[n, m]] for n in range(16)]
    tokens, ids = sum(map(len, written)), [tuple(token for token, _ in row) for row in written]
    expected = {"mean_reward": (sum(map(sum, groups)), 11),
                "mean_log_prob": (sum(p for row in written for _, p in row), tokens),
                "std_reward": (sum(torch.tensor(g).std().item() for g in groups[1:]), 3),
                "frac_reward_zero_std": (2, 4),  # a group without a score and one of equal scores
                "unique_completions": (sum(len(set(ids[4 * i : 4 * i + 4])) for i in range(4)), 4),
                "reward/mine": (float(value.nansum()), 15), "completion_length": (tokens, 16)}
    for name, pair in expected.items():
        assert [float(x) for x in sums[name]] == pytest.approx(pair, rel=1e-4), name
    assert sums["text_tokens"][0] == tokens and sums["skipped_samples"][0] == 5
    assert tokens < rollouts.mask.numel()
