"""Objectives against loops written from the papers' formulas, in float64."""

import itertools

import pytest
import torch

from grpo import losses
from grpo.losses import AVERAGES, OBJECTIVES, Objective, token_weights
from tests.tiny import config, consumer, fill_policy, grpo_step, judge, loss_of, rewards, same
from tests.objectives.tables import MAX_TOKENS, G, N, P, V, objective_config, table_rollouts, with_advantage
from tests.vectors.make import PAPERS, advantage_by_hand, kl_by_hand, loss_by_hand

ESTIMATORS = ["none", "exact", "k2", "k3", "in reward"]


def exact_kl_by_hand(p, q):
    """One token's KL. p, q: log-probabilities over the vocabulary."""
    return sum(torch.exp(p[v]) * (p[v] - q[v]) for v in range(V))


def objective_by_hand(name, logits, rollouts, reference, reward, estimator, kl_beta, clip=None):
    """The paper's formula of objective `name`, token by token. Returns the loss, differentiable in logits."""
    lengths, row = [int(n) for n in rollouts.mask.sum(1)], PAPERS[name]
    old, p = rollouts.old_logp, logits.log_softmax(-1)
    logp, ref = (table.gather(-1, rollouts.target[..., None])[..., 0] for table in (p, reference))
    if clip:
        row = row._replace(low=clip[0], high=clip[1])
    if estimator == "in reward":
        penalty = [sum(float(old[i, t] - ref[i, t]) for t in range(lengths[i])) for i in range(N)]
        reward = reward - kl_beta * torch.tensor(penalty, dtype=torch.float64).view(P, G)
    advantage = advantage_by_hand(row.advantage, reward.tolist())
    kl = {"exact": lambda i, t: exact_kl_by_hand(p[i, t], reference[i, t]), "none": None, "in reward": None}.get(
        estimator, lambda i, t: kl_by_hand(estimator, logp[i, t], old[i, t], ref[i, t]))
    return loss_by_hand(row, logp, old, advantage, lengths, MAX_TOKENS, kl, kl_beta)


def clips(surrogate, clip):
    """True for a surrogate that cuts tokens of these rollouts; some do within narrower bounds than their own alone."""
    return surrogate == "clip" or (clip is not None and surrogate in ("detached_ratio", "probability_mask"))


BOUNDED = [name for name, row in OBJECTIVES.items() if row.clip_low is not None]


@pytest.mark.parametrize("name, estimator, clip", [
    *itertools.product(OBJECTIVES, ESTIMATORS, [None]), *itertools.product(BOUNDED, ESTIMATORS, [(0.05, 0.15)])])
def test_loss_and_gradient_equal_the_papers_sum(name, estimator, clip):
    policy, rollouts, reference, reward = table_rollouts()
    c = objective_config(name, estimator, clip_low=clip and clip[0], clip_high=clip and clip[1])
    rollouts = with_advantage(estimator, rollouts, reference, reward, c)
    weight = token_weights(rollouts.train_mask, OBJECTIVES[name].average, MAX_TOKENS)
    loss, metrics = loss_of(policy, rollouts, weight, c)
    loss.backward()

    twin = policy.logits.detach().clone().requires_grad_()
    by_hand = objective_by_hand(name, twin, rollouts, reference, reward, estimator, 0.3, clip)
    by_hand.backward()
    torch.testing.assert_close(loss, by_hand, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(policy.logits.grad, twin.grad, rtol=1e-10, atol=1e-12)
    clipped, tokens = metrics["clip_fraction"]
    assert tokens == rollouts.mask.sum() and (clipped > 0 or not clips(OBJECTIVES[name].surrogate, clip))
    if estimator == "none" and name != "cispo":
        without_gradient = (policy.logits.grad == 0).all(-1) & (rollouts.mask > 0)
        assert clipped == without_gradient.sum()
    if estimator not in ("none", "in reward"):
        torch.testing.assert_close(metrics["pg_loss"][0] + metrics["kl_penalty"][0], loss.detach())


@pytest.mark.parametrize("of_tokens", [False, True], ids=["completions", "tokens"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_the_gradient_is_that_of_the_advantage_times_the_log_probability(name, of_tokens):
    """At ratio 1 all are REINFORCE with their own baseline and weights, also with an advantage per token."""
    policy, rollouts, reference, reward = table_rollouts()
    c = objective_config(name, "none")
    rollouts = with_advantage("none", rollouts, reference, reward, c)
    if of_tokens:
        rollouts.advantage = torch.randn(rollouts.mask.shape, dtype=torch.float64)
    weight = token_weights(rollouts.train_mask, OBJECTIVES[name].average, MAX_TOKENS)
    loss_of(policy, rollouts, weight, c, on_policy=True)[0].backward()
    twin = policy.logits.detach().clone().requires_grad_()
    logp = twin.log_softmax(-1).gather(-1, rollouts.target[..., None])[..., 0]
    (-(logp * rollouts.advantage * weight).sum()).backward()
    torch.testing.assert_close(policy.logits.grad, twin.grad)


def test_the_entropy_bonus_is_the_entropys_gradient():
    policy, rollouts, reference, reward = table_rollouts()
    c = objective_config("grpo", "none", entropy_bonus=0.7)
    rollouts = with_advantage("none", rollouts, reference, torch.ones_like(reward), c)
    weight = token_weights(rollouts.train_mask, "token", MAX_TOKENS)
    loss, metrics = loss_of(policy, rollouts, weight, c)
    loss.backward()
    twin = policy.logits.detach().clone().requires_grad_()
    p = twin.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    (-0.7 * (entropy * weight).sum()).backward()
    torch.testing.assert_close(policy.logits.grad, twin.grad)
    torch.testing.assert_close(metrics["entropy"][0], (entropy * rollouts.mask).sum().detach())


@pytest.mark.parametrize("average", AVERAGES)
def test_weights_count_over_all_ranks_and_only_completions_with_a_token_in_the_loss(average):
    mask = torch.ones(8, 3)
    mask[2:] = 0
    alone = token_weights(mask[:2], average, 3)
    torch.testing.assert_close(token_weights(mask, average, 3)[:2], alone)
    assert torch.equal(token_weights(mask[:2], average, 3, total=lambda x: 2 * x), alone / 2)


def test_a_new_algorithm_is_a_row(dataset, monkeypatch):
    """Ten lines: GRPO with a soft ratio, sigmoid(4 (r - 1)) A instead of a clip."""
    def soft(r, low, high, logp, advantage):
        return (4 * (r - 1)).sigmoid() * advantage

    monkeypatch.setitem(losses.SURROGATES, "soft", soft)
    row = Objective("-mean sigmoid(4 (r - 1)) A", "none", "group_std", "sequence", surrogate="soft")
    monkeypatch.setitem(OBJECTIVES, "soft_grpo", row)
    c, policy = config(objective="soft_grpo"), fill_policy(seed=1, scale=3.0)
    metrics = grpo_step(policy, policy.frozen(), rewards(c, judge()), consumer(dataset, c), c)
    assert metrics["grad_norm"] > 0 and not same(policy, fill_policy(seed=1, scale=3.0))
