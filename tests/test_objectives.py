"""Objectives, advantages and KL estimators against loops written from the papers' formulas, in float64."""

import dataclasses
import itertools
import math
import types

import pytest
import torch

from grpo.advantages import ADVANTAGES, compute_advantages
from grpo.grpo_training_step import compute_rewards, compute_rollout_advantages, overlong, rollout_loss
from grpo.objectives import OBJECTIVES, policy_loss, token_weights
from grpo.rollout import Rollouts
from grpo.step_metrics import discriminative_sums
from tests.tiny import config

G, P, M, V, BUDGET = 4, 3, 5, 7, 8
N = P * G
ESTIMATORS = ["none", "exact", "k2", "k3", "k2 importance", "k3 importance", "in reward"]
OWN_CLIP = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
OWN_ADVANTAGE = {"grpo": "group_std", "dr_grpo": "group_mean", "drgrpo": "group_mean", "dapo": "group_std",
                 "bnpo": "group_std", "gspo": "group_std", "cispo": "group_std", "rloo": "leave_one_out",
                 "reinforce++": "step", "reinforce++_baseline": "batch_std", "plain": "batch_std"}


class Table(torch.nn.Module):
    """A policy whose logits are its parameters, (N, M, V)."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.config = torch.nn.Parameter(logits), types.SimpleNamespace(base_vocab_size=V)

    def states(self, inputs, position, padding=None):
        return self.logits[inputs[:, 0]]

    def project(self, h):
        return h


def example():
    """A policy, what it said when it sampled (old), a reference, and rollouts of unequal lengths with rewards."""
    g = torch.Generator().manual_seed(11)
    logits, ref = (torch.randn(N, M, V, dtype=torch.float64, generator=g) for _ in range(2))
    old = (logits + 0.3 * torch.randn(N, M, V, dtype=torch.float64, generator=g)).log_softmax(-1)
    target = torch.randint(V, (N, M), generator=g)
    lengths = torch.randint(1, M + 1, (N,), generator=g)
    mask = (torch.arange(M) < lengths[:, None]).double()
    rollouts = Rollouts(prompt=None, padding=None, inputs=torch.arange(N)[:, None],
                        position=torch.zeros(N, M, dtype=torch.long), length=None, target=target, mask=mask,
                        old_logp=old.gather(-1, target[..., None])[..., 0], kept=None, ref_logp=None, ref_full=None,
                        truth=None, truncated=None, longest=BUDGET, kl_estimator="k3", tokens=None, texts=None,
                        problems=P)
    return Table(logits), rollouts, ref.log_softmax(-1), torch.rand(P, G, dtype=torch.float64, generator=g)


def advantage_by_hand(name, reward):
    rows, out = reward.tolist(), []
    centred = [[r - sum(row) / G for r in row] for row in rows]
    step_std = math.sqrt(sum(c * c for row in centred for c in row) / (N - 1))
    mean = sum(map(sum, rows)) / N
    spread = math.sqrt(sum((r - mean) ** 2 for row in rows for r in row) / (N - 1))
    for row, c in zip(rows, centred, strict=True):
        std = math.sqrt(sum(x * x for x in c) / (G - 1))
        for i, r in enumerate(row):
            others = [x for j, x in enumerate(row) if j != i]
            out.append({"group_std": c[i] / (std + 1e-4), "group_mean": c[i],
                        "leave_one_out": r - sum(others) / (G - 1), "batch_std": c[i] / (step_std + 1e-4),
                        "step": (r - mean) / (spread + 1e-4)}[name])
    return out


def kl_by_hand(estimator, p, q, old, ref):
    """One token's KL term. p, q: log-probabilities over the vocabulary; old: of the chosen one, now and then."""
    chosen, kind = old["now"], estimator.split()[0]
    x = ref - chosen
    value = {"exact": lambda: sum(torch.exp(p[v]) * (p[v] - q[v]) for v in range(V)),
             "k2": lambda: x * x / 2, "k3": lambda: torch.exp(x) - x - 1}[kind]()
    return torch.exp(chosen - old["then"]) * value if "importance" in estimator else value


def loss_by_hand(name, logits, rollouts, reference, reward, estimator, kl_beta, cap=None, clip=None):
    """The paper's formula of objective `name`, token by token. Returns the loss, differentiable in logits."""
    lengths = [int(n) for n in rollouts.mask.sum(1)]
    old, tokens = rollouts.old_logp, sum(lengths)
    p = logits.log_softmax(-1)
    q = [[reference[i, t, rollouts.target[i, t]] for t in range(M)] for i in range(N)]
    if estimator == "in reward":
        spent = [sum(float(old[i, t] - q[i][t]) for t in range(lengths[i])) for i in range(N)]
        reward = reward - kl_beta * torch.tensor(spent, dtype=torch.float64).view(P, G)
    advantage, loss = advantage_by_hand(OWN_ADVANTAGE[name], reward), 0.0
    low, high = clip or OWN_CLIP.get(name, (0.2, 0.2))
    for i in range(N):
        said = [p[i, t, rollouts.target[i, t]] for t in range(lengths[i])]
        A, ratios = advantage[i], [torch.exp(said[t] - old[i, t]) for t in range(lengths[i])]
        if name == "gspo":
            s = torch.exp(sum(said[t] - old[i, t] for t in range(lengths[i])) / lengths[i])
            ratios = [s] * lengths[i]
        for t in range(lengths[i]):
            r = ratios[t]
            clipped = torch.clamp(r, 1 - low, 1 + high)
            if name == "cispo":
                term = clipped.detach() * A * said[t]
            else:
                term = torch.minimum(r * A, clipped * A)
                if cap is not None and A < 0:
                    term = torch.maximum(term, torch.tensor(cap * A, dtype=torch.float64))
            share = {"grpo": 1 / lengths[i] / N, "gspo": 1 / lengths[i] / N, "dr_grpo": 1 / BUDGET / N,
                     "drgrpo": 1 / BUDGET / N, "rloo": 1 / N, "plain": 1 / N}.get(name, 1 / tokens)
            loss = loss - share * term
            if estimator not in ("none", "in reward"):
                both = {"now": said[t], "then": old[i, t]}
                loss = loss + share * kl_beta * kl_by_hand(estimator, p[i, t], reference[i, t], both, q[i][t])
    return loss


def settings(name, estimator, **more):
    none, importance = estimator == "none", "importance" in estimator
    return config(objective=name, kl_beta=0.0 if none else 0.3, kl_importance=importance,
                  kl_in_reward=estimator == "in reward", batch_size=P, group_size=G, max_new_tokens=BUDGET,
                  kl_estimator=None if none or estimator == "in reward" else estimator.split()[0], **more)


def ours(name, estimator, rollouts, reference, reward, c):
    """The rollouts as the phases of a step leave them."""
    chosen = reference.gather(-1, rollouts.target[..., None])[..., 0]
    rollouts = dataclasses.replace(rollouts, kl_estimator=c.kl_estimator or "k3",
                                   ref_full=reference if estimator == "exact" else None,
                                   ref_logp=None if estimator in ("exact", "none") else chosen)
    given = lambda _: (reward, reward[..., None], {})
    reward, credit, _ = compute_rewards(given, rollouts, c, c.kl_beta)
    return compute_rollout_advantages(rollouts, reward, credit, c, types.SimpleNamespace(total=lambda x: x))


@pytest.mark.parametrize("name, estimator", list(itertools.product(OBJECTIVES, ESTIMATORS)))
@pytest.mark.parametrize("cap, clip", [(None, None), (1.5, None), (None, (0.05, 0.15)), (1.3, (0.15, 0.05))])
def test_loss_and_gradient_equal_the_papers_sum(name, estimator, cap, clip):
    if cap and name == "cispo":
        pytest.skip("cispo has no unclipped branch")
    policy, rollouts, reference, reward = example()
    c = settings(name, estimator, clip_cap=cap, **(dict(zip(("clip_low", "clip_high"), clip)) if clip else {}))
    rollouts = ours(name, estimator, rollouts, reference, reward, c)
    weight = token_weights(rollouts.mask, OBJECTIVES[name].average, BUDGET)
    loss, metrics = rollout_loss(policy, rollouts, weight, c, c.kl_beta, on_policy=False)
    loss.backward()

    twin = policy.logits.detach().clone().requires_grad_()
    by_hand = loss_by_hand(name, twin, rollouts, reference, reward, estimator, 0.3, cap, clip)
    by_hand.backward()
    torch.testing.assert_close(loss, by_hand)
    torch.testing.assert_close(policy.logits.grad, twin.grad)
    assert metrics["clip_fraction"] < rollouts.mask.sum() or name == "gspo"
    assert metrics["clip_fraction"] > 0 or name == "cispo" and not clip
    if estimator not in ("none", "in reward"):
        torch.testing.assert_close(metrics["pg_loss"] + metrics["kl_penalty"], loss.detach())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_the_gradient_is_that_of_the_advantage_times_the_log_probability(name):
    """At ratio 1 all of them are REINFORCE with their own baseline and weights."""
    policy, rollouts, reference, reward = example()
    c = settings(name, "none")
    rollouts = ours(name, "none", rollouts, reference, reward, c)
    weight = token_weights(rollouts.mask, OBJECTIVES[name].average, BUDGET)
    rollout_loss(policy, rollouts, weight, c, 0.0, on_policy=True)[0].backward()
    twin = policy.logits.detach().clone().requires_grad_()
    logp = twin.log_softmax(-1).gather(-1, rollouts.target[..., None])[..., 0]
    (-(logp * rollouts.advantage * weight).sum()).backward()
    torch.testing.assert_close(policy.logits.grad, twin.grad)


def test_the_entropy_bonus_is_the_entropys_gradient():
    policy, rollouts, reference, reward = example()
    c = settings("grpo", "none", entropy_bonus=0.7)
    rollouts = ours("grpo", "none", rollouts, reference, torch.ones_like(reward), c)
    weight = token_weights(rollouts.mask, "token", BUDGET)
    loss, metrics = rollout_loss(policy, rollouts, weight, c, 0.0)
    loss.backward()
    twin = policy.logits.detach().clone().requires_grad_()
    p = twin.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    (-0.7 * (entropy * weight).sum()).backward()
    torch.testing.assert_close(policy.logits.grad, twin.grad)
    torch.testing.assert_close(metrics["entropy"], (entropy * rollouts.mask).sum().detach())


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantage_equals_its_formula(name):
    reward = example()[3]
    torch.testing.assert_close(compute_advantages(reward[..., None], name).flatten(),
                               torch.tensor(advantage_by_hand(name, reward), dtype=torch.float64))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_exactly_zero(name):
    groups = [[0.1] * 7, [0.1] * 7] if name == "step" else [[0.1] * 7, [0.3] * 7]
    reward = torch.tensor(groups)[..., None]  # the mean of seven 0.1 is not 0.1 in float32
    assert (compute_advantages(reward, name) == 0).all()


def test_a_step_wide_baseline_counts_groups_of_equal_rewards():
    reward = torch.tensor([[1.0, 1.0], [0.0, 0.0]])[..., None]
    assert compute_advantages(reward, "step").flatten().sign().tolist() == [1, 1, -1, -1]


def test_weights_count_over_all_ranks():
    mask = torch.ones(4, 2)
    for average in ("sum", "sequence", "token", "constant"):
        alone = token_weights(mask, average, 1)
        assert torch.equal(token_weights(mask, average, 1, total=lambda x: 2 * x), alone / 2)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_padding_changes_nothing(name):
    policy, rollouts, _, reward = example()
    logp = policy.logits.detach().log_softmax(-1).gather(-1, rollouts.target[..., None])[..., 0]
    pad = lambda x, value: torch.cat((x, torch.full((len(x), 3), value, dtype=x.dtype)), 1)
    row = OBJECTIVES[name]
    advantage = compute_advantages(reward[..., None], row.advantage).view(-1, 1)
    bare = policy_loss(logp, rollouts.old_logp, advantage, token_weights(rollouts.mask, row.average, BUDGET), row)[0]
    wide = token_weights(pad(rollouts.mask, 0.0), row.average, BUDGET)
    padded = policy_loss(pad(logp, -3.0), pad(rollouts.old_logp, 50.0), advantage, wide, row)[0]
    torch.testing.assert_close(bare, padded)


def test_a_huge_ratio_stays_finite():
    for row in OBJECTIVES.values():
        old, A = torch.full((1, 1), -1e4), torch.tensor([[-1.0]])
        loss, *_ = policy_loss(torch.zeros(1, 1), old, A, torch.ones(1, 1), row)
        assert torch.isfinite(loss)


def test_the_overlong_penalty_is_the_papers():
    length = torch.tensor([10.0, 80.0, 90.0, 99.0, 100.0])
    torch.testing.assert_close(overlong(length, 100, 20), torch.tensor([0.0, 0.0, -0.5, -0.95, -1.0]))


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


def test_every_objective_names_its_formula_and_its_paper():
    for name, row in OBJECTIVES.items():
        assert "A" in row.formula and ("arXiv" in row.paper or "Williams" in row.paper), name
        assert row.advantage in ADVANTAGES
