"""The KL divergence to the reference: estimators against enumeration, their choice, the penalty, the controller; and how
the reference moves."""

import math
from types import SimpleNamespace

import pytest
import torch

from core.models import load_model
from grpo.grpo_training_step import with_advantage
from grpo.losses import KL_ESTIMATORS, exact_kl, k2, k3, kl_penalty, kl_per_token
from grpo.metrics import rollout_sums
from grpo.policies.causal import CausalPolicy
from grpo.reference import ADAPT_RANGE, adapted, choose_estimator, ema, penalty_weight, periodic, with_reference
from grpo.rewards import Scored
from grpo.rollout import Scores
from tests.families import model_folder
from tests.tiny import config, fill_policy, one_process, same, sampled, shaped, train


def distributions(V=6):
    """Logits with a gradient, and the log-probabilities of a reference."""
    return torch.randn(V, dtype=torch.float64).requires_grad_(), torch.randn(V, dtype=torch.float64).log_softmax(-1)


def true_kl(p, q):
    return sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))


def test_estimators_by_hand():
    p, q = torch.tensor((-1.0, -1.5))
    assert float(k3(p, q)) == pytest.approx(math.exp(-0.5) + 0.5 - 1) and float(k2(p, q)) == pytest.approx(0.125)
    logits, q = distributions()
    p = logits.log_softmax(-1)
    assert float(exact_kl(p, q).detach()) == pytest.approx(true_kl(p, q))


def test_the_expected_value_of_k3_is_the_kl():
    logits, q = distributions()
    p = logits.log_softmax(-1)
    assert float((p.exp() * k3(p, q)).sum().detach()) == pytest.approx(true_kl(p, q))


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_expected_gradient_with_importance_weights_is_that_of_the_kl(estimator, on_policy):
    """The expectation is over what an older policy samples, by enumeration."""
    logits, q = distributions()
    exact_kl(logits.log_softmax(-1), q).backward()
    expected, logits.grad = logits.grad, None
    p = logits.log_softmax(-1)
    old = p.detach() if on_policy else torch.randn(6, dtype=torch.float64).log_softmax(-1)
    rollouts = SimpleNamespace(ref_logp=q)
    kl = kl_per_token(Scores(p, None), rollouts, estimator, ratio=(p - old).exp())
    (old.exp() * kl).sum().backward()
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("away", [1e-6, 1e-3, 1.0])
def test_k3_is_exact_where_the_policies_are_close(away):
    x = away * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    value = k3(torch.zeros_like(x), x)
    exact = x.double().expm1() - x.double()
    assert (value >= 0).all()
    torch.testing.assert_close(value.double().mean(), exact.mean(), rtol=1e-4 / min(away, 1), atol=0)


def test_the_estimator_is_the_configs_or_suits_the_policy():
    fill, causal = SimpleNamespace(kl_estimator="exact"), SimpleNamespace(kl_estimator="k3")
    assert choose_estimator(config(), fill) == "exact" and choose_estimator(config(), causal) == "k3"
    for name in ("exact", "k2", "k3"):
        c = config(kl_estimator=name)
        assert choose_estimator(c, fill) == choose_estimator(c, causal) == name
    assert choose_estimator(config(kl_in_reward=True), fill) == "k3", "it needs sampled tokens"
    assert choose_estimator(config(kl_in_reward=True, kl_estimator="k2"), fill) == "k2"


def test_the_penalty_counts_tokens_of_the_loss_alone():
    kl, weight = torch.tensor([[1.0, 2.0, math.inf]]), torch.tensor([[0.5, 0.25, 0.0]])
    assert float(kl_penalty(kl, weight, penalty_weight(config(kl_beta=0.3)))) == pytest.approx(0.3)
    assert penalty_weight(config(kl_beta=0.3, kl_in_reward=True)) == 0


def test_kl_in_the_reward_moves_the_advantage_and_not_the_loss(dataset):
    policy, reference = fill_policy(seed=1), fill_policy(seed=2).frozen()
    c = config(kl_in_reward=True, kl_beta=0.5)
    rollouts = with_reference(sampled(policy, dataset, c), reference, "k3", c)
    _, scored = shaped(rollouts, Scored(torch.zeros(4, 4)), c)
    expected = [-0.5 * sum(float(rollouts.old_logp[n, m] - rollouts.ref_logp[n, m])
                           for m in range(rollouts.mask.shape[1]) if rollouts.mask[n, m]) for n in range(16)]
    assert (scored.reward == 0).all(), "metrics and zero_std see the reward of the task"
    torch.testing.assert_close(scored.penalty.flatten(), torch.tensor(expected))
    torch.testing.assert_close(scored.values["kl"], torch.tensor(expected))
    sums = rollout_sums(rollouts, scored, torch.ones(4, dtype=torch.bool))
    rollouts = with_advantage(rollouts, scored, "group_std", one_process())
    assert rollouts.advantage.abs().max() > 0
    sums["mean_advantage"] = rollouts.advantage.sum(), rollouts.train_mask.sum()
    metrics = train(policy, rollouts, sums, c)
    assert metrics["kl_penalty"] == 0 and metrics["loss"] == metrics["pg_loss"] and metrics["mean_kl"] > 0


def test_kl_beta_moves_towards_its_target_and_is_clamped():
    c = config(kl_beta=0.1, kl_target=0.5)
    assert adapted(0.1, 0.5, c) == 0.1
    assert adapted(0.1, 0.55, c) == pytest.approx(0.1 * 1.01), "10% too far raises it by a tenth of 10%"
    assert adapted(0.1, 50.0, c) == pytest.approx(0.1 * 1.02), "the error counts at most 20%"
    assert adapted(0.1, 1e-9, c) == pytest.approx(0.1 * 0.98)
    assert adapted(0.1, 0.0, c) == adapted(0.1, float("nan"), c) == 0.1, "nothing measured, nothing moved"
    assert adapted(0.1 * ADAPT_RANGE, 50.0, c) == 0.1 * ADAPT_RANGE
    assert adapted(0.1 / ADAPT_RANGE, 1e-9, c) == 0.1 / ADAPT_RANGE
    assert adapted(0.1, 50.0, config(kl_beta=0.1)) == 0.1, "without a target it stays"


# The reference

def test_an_ema_reference_follows_once_where_input_and_output_share_a_matrix(tmp_path):
    pytest.importorskip("transformers")
    model, tokenizer = load_model(model_folder(tmp_path / "gpt2", "gpt2"))
    policy = CausalPolicy(model, tokenizer)
    reference = policy.frozen()
    before = policy.frozen().weights()
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    ema(reference, policy, 1, config(reference_mode="ema", ema_alpha=0.9))
    for name, x in reference.weights().items():
        torch.testing.assert_close(x, before[name] + 0.1, rtol=1e-4, atol=1e-5)


def test_a_periodic_reference_becomes_the_policy_when_its_time_comes():
    policy, reference, before = fill_policy(seed=1), fill_policy(seed=2).frozen(), fill_policy(seed=2)
    c = config(reference_mode="periodic", reference_update_freq=3)
    for iteration in (1, 2):
        periodic(reference, policy, iteration, c)
        assert same(reference, before)
    periodic(reference, policy, 3, c)
    assert same(reference, policy) and not any(p.requires_grad for p in reference.parameters())
