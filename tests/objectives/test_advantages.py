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
    found = normalised({"mine": value.flatten()}, 6)["mine"].tolist()
    expected = []
    for group in value.tolist():
        seen = [x for x in group if not math.isnan(x)]
        expected += [(x - statistics.mean(seen)) / (statistics.stdev(seen) + 1e-4) for x in group]
    assert found == pytest.approx(expected, abs=2e-5, nan_ok=True)
