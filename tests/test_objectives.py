"""Objectives and advantages against loops written from the papers' formulas, in float64."""

import math

import pytest
import torch

from grpo.advantages import ADVANTAGES, compute_advantages
from grpo.objectives import OBJECTIVES, policy_loss, token_weights

G, P, M, BUDGET = 4, 3, 5, 8


def example():
    g = torch.Generator().manual_seed(11)
    logp = torch.randn(P * G, M, dtype=torch.float64, generator=g, requires_grad=True)
    old = logp.detach() + 0.3 * torch.randn(P * G, M, dtype=torch.float64, generator=g)
    lengths = torch.randint(1, M + 1, (P * G,), generator=g)
    mask = (torch.arange(M) < lengths[:, None]).double()
    return logp, old, mask, torch.rand(P, G, dtype=torch.float64, generator=g)


def advantage_by_hand(name, reward):
    rows, out = reward.tolist(), []
    centred = [[r - sum(row) / G for r in row] for row in rows]
    step_std = math.sqrt(sum(c * c for row in centred for c in row) / (P * G - 1))
    for row, c in zip(rows, centred, strict=True):
        std = math.sqrt(sum(x * x for x in c) / (G - 1))
        for i, r in enumerate(row):
            others = [x for j, x in enumerate(row) if j != i]
            out.append({"group_std": c[i] / (std + 1e-4), "group_mean": c[i],
                        "leave_one_out": r - sum(others) / (G - 1), "batch_std": c[i] / (step_std + 1e-4)}[name])
    return out


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantage_equals_its_formula(name):
    reward = example()[3]
    torch.testing.assert_close(compute_advantages(reward, name).flatten(),
                               torch.tensor(advantage_by_hand(name, reward), dtype=torch.float64))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_exactly_zero(name):
    reward = torch.tensor([[0.1] * 7, [0.3] * 7])  # the mean of seven 0.1 is not 0.1 in float32
    assert (compute_advantages(reward, name) == 0).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_and_gradient_equal_the_papers_sum(objective):
    logp, old, mask, reward = example()
    row = OBJECTIVES[objective]
    advantage = torch.tensor(advantage_by_hand(row.advantage, reward), dtype=torch.float64)
    weight = token_weights(mask, row.average, BUDGET)
    loss, metrics = policy_loss(logp, old, advantage[:, None], weight)
    loss.backward()

    by_hand, N = 0.0, P * G
    twin = logp.detach().clone().requires_grad_()
    for i in range(N):
        terms = []
        for t in range(M):
            if mask[i, t]:
                r = torch.exp(twin[i, t] - old[i, t])
                terms.append(torch.minimum(r * advantage[i], torch.clamp(r, 0.8, 1.2) * advantage[i]))
        share = {"grpo": 1 / len(terms), "dr_grpo": 1 / BUDGET, "plain": 1.0}[objective]
        by_hand = by_hand - share * sum(terms) / N
    by_hand.backward()
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(logp.grad, twin.grad)
    assert 0 < metrics["clip_fraction"] < mask.sum()


def test_weights_count_over_all_ranks():
    mask = torch.ones(4, 2)
    alone = token_weights(mask, "sum", 1)
    assert torch.equal(token_weights(mask, "sum", 1, total=lambda x: 2 * x), alone / 2)


def test_padding_changes_nothing():
    logp, old, mask, reward = example()
    pad = lambda x, value: torch.cat((x, torch.full((len(x), 3), value, dtype=x.dtype)), 1)
    for row in OBJECTIVES.values():
        advantage = compute_advantages(reward, row.advantage).view(-1, 1)
        bare = policy_loss(logp, old, advantage, token_weights(mask, row.average, BUDGET))[0]
        wide = token_weights(pad(mask, 0.0), row.average, BUDGET)
        padded = policy_loss(pad(logp, -3.0), pad(old, 50.0), advantage, wide)[0]
        torch.testing.assert_close(bare, padded)


def test_a_huge_ratio_stays_finite():
    loss, _ = policy_loss(torch.zeros(1, 1), torch.full((1, 1), -1e4), torch.tensor([[-1.0]]), torch.ones(1, 1))
    assert torch.isfinite(loss)
