"""The KL to a reference or teacher: values and gradients against enumeration, in the loss and in the reward."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from grpo.losses import (
    KL_ESTIMATORS, OBJECTIVES, compute_advantages, exact_kl, k2, k3, kl_as_reward, kl_penalty, kl_per_token,
    policy_loss)
from grpo.reference import choose_estimator, with_reference
from grpo.rewards import Rewards
from grpo.rollout import Scores
from tests.tiny import (
    causal_policy,
    config,
    consumer,
    fill_policy,
    fixed_rewards,
    grpo_step,
    prompt_config,
    prompt_consumer,
    sampled,
    shaped,
    step_gradient,
)


def distributions(V=6):
    """Logits with a gradient, and the log-probabilities of a reference."""
    return torch.randn(V, dtype=torch.float64).requires_grad_(), torch.randn(V, dtype=torch.float64).log_softmax(-1)


def test_estimators_by_hand_and_their_expectation_by_enumeration():
    p, q = torch.tensor((-1.0, -1.5))
    assert float(k3(p, q)) == pytest.approx(math.exp(-0.5) + 0.5 - 1) and float(k2(p, q)) == pytest.approx(0.125)
    logits, q = distributions()
    p = logits.log_softmax(-1).detach()
    expected = sum(math.exp(a) * (a - b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert float(exact_kl(p, q)) == pytest.approx(expected)
    assert float((p.exp() * k3(p, q)).sum()) == pytest.approx(expected)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_expected_gradient_with_importance_weights_is_that_of_the_kl(estimator, on_policy):
    """The expectation is over what an older policy samples, by enumeration."""
    logits, q = distributions()
    exact_kl(logits.log_softmax(-1), q).backward()
    expected, logits.grad = logits.grad, None
    p = logits.log_softmax(-1)
    old = p.detach() if on_policy else torch.randn(6, dtype=torch.float64).log_softmax(-1)
    kl = kl_per_token(Scores(p, None), SimpleNamespace(ref_logp=q), estimator, ratio=(p - old).exp())
    (old.exp() * kl).sum().backward()
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("away", [1e-6, 1e-3, 1.0])
def test_k3_is_exact_where_the_policies_are_close(away):
    x = away * torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    value = k3(torch.zeros_like(x), x)
    exact = x.double().expm1() - x.double()
    assert (value >= 0).all()
    torch.testing.assert_close(value.double().mean(), exact.mean(), rtol=1e-4 / min(away, 1), atol=0)


@pytest.mark.parametrize("settings, of_fill, of_causal", [
    ({}, "exact", "k3"), ({"kl_in_reward": True}, "k3", "k3"), ({"kl_estimator": "k2"}, "k2", "k2"),
    ({"teacher_checkpoint": "t", "kl_beta": 0.0}, "exact", "exact")])
def test_the_estimator_is_the_configs_or_suits_the_policy(settings, of_fill, of_causal):
    c = config(**settings)
    assert choose_estimator(c, SimpleNamespace(kl_estimator="exact")) == of_fill
    assert choose_estimator(c, SimpleNamespace(kl_estimator="k3")) == of_causal


def test_another_reference_gives_another_gradient_and_the_policy_itself_none(prompts):
    c, policy = prompt_config(kl_beta=1.0), causal_policy(seed=1)

    def gradient(reference):
        equal = fixed_rewards(torch.ones(4, 4))
        return step_gradient(policy, reference.frozen(), equal, prompt_consumer(prompts, c), c)

    one, other = gradient(causal_policy(seed=2)), gradient(causal_policy(seed=3))
    assert (one - other).norm() > 0.1 * one.norm() > 0 and gradient(policy).norm() < 1e-6 * one.norm()


def test_kl_in_the_reward_moves_the_advantage_and_not_the_loss(dataset):
    policy, reference = fill_policy(seed=1), fill_policy(seed=2).frozen()
    c, equal = config(kl_in_reward=True, kl_beta=0.5), fixed_rewards(torch.zeros(4, 4))
    rollouts = with_reference(sampled(policy, dataset, c), reference, "k3", c)
    expected = [-0.5 * sum(float(rollouts.old_logp[n, m] - rollouts.ref_logp[n, m])
                           for m in range(rollouts.mask.shape[1]) if rollouts.mask[n, m]) for n in range(16)]
    _, scored = shaped(rollouts, equal(rollouts), c)
    assert (scored.reward == 0).all(), "metrics and zero_std see the reward of the task"
    torch.testing.assert_close(scored.penalty.flatten(), torch.tensor(expected))
    metrics = grpo_step(policy, reference, equal, consumer(dataset, c), c)
    assert metrics["reward/kl"] == pytest.approx(sum(expected) / 16, rel=1e-4)
    assert metrics["kl_penalty"] == 0 and metrics["loss"] == metrics["pg_loss"]
    assert metrics["mean_kl"] > 0 and metrics["grad_norm"] > 0


# Of whole completions, by enumeration

class Table:
    """Every completion of two tokens out of three: a policy, which is a table of logits, and a teacher."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.logits = torch.randn(4, 3, dtype=torch.float64).requires_grad_()  # of the first token, and after each one
        self.teacher = torch.randn(4, 3, dtype=torch.float64).log_softmax(-1)
        self.target = torch.tensor(list(itertools.product(range(3), repeat=2)))      # (9, 2)
        self.state = torch.stack((torch.zeros(9, dtype=torch.long), self.target[:, 0] + 1), 1)  # (9, 2)

    def logp(self):
        """(9, 2) of the tokens under the policy, and under the teacher."""
        own = self.logits.log_softmax(-1)
        return tuple(x[self.state].gather(-1, self.target[..., None])[..., 0] for x in (own, self.teacher))

    def exact(self):
        """(9, 2) the KL of the distribution that each token is drawn from."""
        own = self.logits.log_softmax(-1)
        return F.kl_div(self.teacher, own, log_target=True, reduction="none").sum(-1)[self.state]

    def gradient(self, loss):
        return torch.autograd.grad(loss, self.logits, retain_graph=True)[0]


def rolled(logp, teacher):
    """The fields of rollouts that the KL reads."""
    return SimpleNamespace(mask=torch.ones(9, 2), old_logp=logp.detach(), ref_logp=teacher)


def test_in_the_reward_the_expected_gradient_is_that_of_the_kl_of_whole_completions():
    """It counts what a token changes later, which the KL of each token does not. Groups of two, by enumeration."""
    table = Table()
    logp, teacher = table.logp()
    p = logp.detach().sum(1).exp()
    pairs = torch.tensor(list(itertools.product(range(9), repeat=2)))                # (81, 2)
    reward = kl_as_reward(rolled(logp, teacher), 0.7).sum(1)                         # (9,)
    advantage = compute_advantages(reward[pairs][..., None], "leave_one_out")        # (81, 2, 1)
    weight = (p[pairs].prod(1) / 2)[:, None].expand(81, 2).reshape(-1, 1).expand(162, 2)
    rows = logp[pairs.flatten()]                                                     # (162, 2)
    loss, _, _ = policy_loss(rows, rows.detach(), advantage.flatten(0, 1), weight, OBJECTIVES["rloo"])
    whole = table.gradient(0.7 * (logp.sum(1).exp() * (logp - teacher).sum(1)).sum())
    torch.testing.assert_close(table.gradient(loss), whole)
    of_tokens = table.gradient(0.7 * (table.exact() * p[:, None]).sum())
    assert (whole - of_tokens).norm() > 0.01


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_in_the_loss_the_expected_gradient_is_that_of_the_kl_of_each_token(name, estimator, on_policy):
    """Over all that the sampler can write, also where the ratio of the surrogate is that of the sequence."""
    table = Table()
    logp, teacher = table.logp()
    old = logp.detach() if on_policy else Table(seed=1).logp()[0].detach()
    p = old.sum(1, keepdim=True).exp()                                               # (9, 1)
    _, ratio, _ = policy_loss(logp, old, 0 * p, p.expand(9, 2), OBJECTIVES[name])
    kl = kl_per_token(Scores(logp, None), rolled(old, teacher), estimator, ratio)
    torch.testing.assert_close(table.gradient(kl_penalty(kl, p, 0.7)), table.gradient((0.7 * table.exact() * p).sum()))


# A teacher

@pytest.mark.parametrize("size", [1, 4])
def test_without_rewards_the_teacher_alone_teaches(prompts, size):
    c = config(teacher_checkpoint="passed below", kl_beta=0.0, distill_beta=0.7, max_new_tokens=6, group_size=size)
    policy, teacher = causal_policy(seed=1), causal_policy(seed=2).frozen()
    metrics = grpo_step(policy, teacher, Rewards(c), prompt_consumer(prompts, c), c)
    assert metrics["mean_kl"] > 0.01 and metrics["grad_norm"] > 0 and metrics["empty_steps"] == 0
    assert metrics["loss"] == metrics["kl_penalty"] == pytest.approx(0.7 * metrics["mean_kl"], rel=0.2)
    assert metrics["mean_reward"] == metrics["pg_loss"] == 0
