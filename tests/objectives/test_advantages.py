"""Advantages against loops written from their formulas."""

import math
import statistics
from itertools import product

import pytest
import torch

from grpo.losses import ADVANTAGES, OBJECTIVES, compute_advantages, policy_loss
from grpo.shaping import normalised
from tests.vectors.make import advantage_by_hand


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_equals_its_formula(name):
    reward = torch.rand(3, 4, dtype=torch.float64)
    torch.testing.assert_close(compute_advantages(reward[..., None], name).flatten(),
                               torch.tensor(advantage_by_hand(name, reward.tolist()), dtype=torch.float64))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_exactly_zero(name):
    other = 0.1 if name == "step" else 0.3
    reward = torch.tensor([[0.1] * 7, [other] * 7])[..., None]  # the mean of seven 0.1 is not 0.1 in float32
    assert (compute_advantages(reward, name) == 0).all()


def test_a_step_wide_baseline_tells_close_rewards_from_equal_ones():
    close = torch.tensor([[1000.0, 1000.0005], [1000.0, 1000.0005]])[..., None]
    assert compute_advantages(close, "step").flatten().sign().tolist() == [-1, 1, -1, 1]
    for value in (0.1, 1 / 3, 1000.1, -7e8):
        assert (compute_advantages(torch.full((9, 7, 1), value), "step") == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_completion_that_was_not_scored_has_no_part_in_the_baseline(name):
    reward = torch.rand(2, 5, 1, dtype=torch.float64)
    mask = torch.ones_like(reward)
    mask[:, 3] = 0.0
    found = compute_advantages(reward, name, mask)[..., 0]
    others = torch.tensor(advantage_by_hand(name, reward[:, [0, 1, 2, 4], 0].tolist()), dtype=torch.float64).view(2, 4)
    assert (found[:, 3] == 0).all()
    torch.testing.assert_close(found[:, [0, 1, 2, 4]], others)


@pytest.mark.parametrize("G", [2, 5])
def test_the_expected_gradient_of_max_rl_is_the_sum_of_those_of_pass_at_k_over_k(G):
    """All groups of G completions of a bandit with four arms, of which the first and the third are right. The sum ends
    at k = G - 1, because a group without a right completion teaches nothing."""
    theta = torch.tensor([0.3, 1.5, -0.7, 0.9], dtype=torch.float64, requires_grad=True)
    arms = torch.tensor(list(product(range(4), repeat=G)))                           # (P, G) all groups
    right = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    p = theta.softmax(0)
    chance = p.detach()[arms].prod(1, keepdim=True)                                  # (P, 1)
    advantage = compute_advantages(right[arms][..., None], "max_rl").view(-1, 1)     # (N, 1)
    logp, weight = p.log()[arms].view(-1, 1), chance.expand_as(arms).reshape(-1, 1) / G
    loss, *_ = policy_loss(logp, logp.detach(), advantage, weight, OBJECTIVES["rloo"])
    found, = torch.autograd.grad(-loss, theta)
    pass_at_k = [1 - (1 - (theta.softmax(0) * right).sum()) ** k for k in range(1, G)]
    expected, = torch.autograd.grad(sum(x / k for k, x in enumerate(pass_at_k, 1)), theta)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_each_reward_is_normalised_within_its_group():
    value = torch.rand(4, 6)
    value[1, 2:], value[2, 4], value[3] = math.nan, math.nan, 7.0
    found = normalised(value.flatten(), 6).tolist()
    expected = []
    for group in value.tolist():
        seen = [x for x in group if not math.isnan(x)]
        expected += [(x - statistics.mean(seen)) / (statistics.stdev(seen) + 1e-4) for x in group]
    assert found == pytest.approx(expected, abs=2e-5, nan_ok=True)


def test_the_sum_of_normalised_rewards_gets_the_advantages_of_gdpo():
    """Rewards that oppose each other, but for a little, in group B (arXiv 2601.05242, TRL's normalize_then_sum): each
    normalised within its group, and their sum over the step."""
    rewards = torch.tensor([[[1.0, 1, 0, 0], [1, 1, 0, 0]], [[1.0, 1, 0, 0], [0, 0, 1, 0.98]]])  # (2, P, G)
    summed = sum((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4) for r in rewards)
    expected = (summed - summed.mean()) / (summed.std() + 1e-4)
    ours = sum(normalised(r.flatten(), 4) for r in rewards).view(2, 4, 1).float()
    torch.testing.assert_close(compute_advantages(ours, "gdpo")[..., 0], expected, rtol=1e-3, atol=1e-3)
    assert expected[1].abs().max() < 0.02 and compute_advantages(ours, "group_std")[1].max() > 1
