"""Advantages against loops written from their formulas."""

import pytest
import torch

from grpo.advantages import ADVANTAGES, compute_advantages
from tests.tiny_objectives import advantage_by_hand


@pytest.mark.parametrize("name", ADVANTAGES)
def test_an_advantage_equals_its_formula(name):
    reward = torch.rand(3, 4, dtype=torch.float64)
    torch.testing.assert_close(compute_advantages(reward[..., None], name).flatten(),
                               torch.tensor(advantage_by_hand(name, reward), dtype=torch.float64))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_exactly_zero(name):
    groups = [[0.1] * 7, [0.1] * 7] if name == "step" else [[0.1] * 7, [0.3] * 7]
    reward = torch.tensor(groups)[..., None]  # the mean of seven 0.1 is not 0.1 in float32
    assert (compute_advantages(reward, name) == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_completion_that_was_not_scored_has_no_part_in_the_baseline(name):
    reward = torch.rand(2, 5, 1, dtype=torch.float64)
    mask = torch.ones_like(reward)
    mask[:, 3] = 0.0
    found = compute_advantages(reward, name, mask)[..., 0]
    others = torch.tensor(advantage_by_hand(name, reward[:, [0, 1, 2, 4], 0]), dtype=torch.float64).view(2, 4)
    assert (found[:, 3] == 0).all()
    torch.testing.assert_close(found[:, [0, 1, 2, 4]], others)


def test_a_step_wide_baseline_counts_groups_of_equal_rewards():
    reward = torch.tensor([[1.0, 1.0], [0.0, 0.0]])[..., None]
    assert compute_advantages(reward, "step").flatten().sign().tolist() == [1, 1, -1, -1]
