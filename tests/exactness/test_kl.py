"""The KL to a reference or teacher: values and gradients against enumeration, in the loss and in the reward."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from core.models import load_model
from grpo.losses import (
    KL_ESTIMATORS, OBJECTIVES, compute_advantages, k3, kl_as_reward, kl_penalty, kl_per_token,
    policy_loss)
from grpo.policies.causal import CausalPolicy
from grpo.reference import move_reference
from grpo.rewards import Rewards
from grpo.rollout import Scores
from tests.families import model_folder
from tests.tiny import (
    CAUSAL,
    causal_policy,
    config,
    fixed_rewards,
    grpo_step,
    prompt_config,
    prompt_consumer,
    step_gradient,
)


def test_another_reference_gives_another_gradient_and_the_policy_itself_none(prompts):
    c, policy = prompt_config(kl_beta=1.0), causal_policy(seed=1)

    def gradient(reference):
        equal = fixed_rewards(torch.ones(4, 4))
        return step_gradient(policy, reference.frozen(), equal, prompt_consumer(prompts, c), c)

    one, other = gradient(causal_policy(seed=2)), gradient(causal_policy(seed=3))
    assert (one - other).norm() > 0.1 * one.norm() > 0 and gradient(policy).norm() < 1e-6 * one.norm()


@pytest.mark.parametrize("away", [1e-6, 1e-3, 1.0])
def test_k3_is_exact_where_the_policies_are_close(away):
    x = away * torch.randn(10_000)
    value, exact = k3(torch.zeros_like(x), x), x.double().expm1() - x.double()
    assert (value >= 0).all()
    torch.testing.assert_close(value.double().mean(), exact.mean(), rtol=1e-4 / min(away, 1), atol=0)


@torch.no_grad()
def test_an_ema_reference_follows_once_where_input_and_output_share_a_matrix(tmp_path):
    pytest.importorskip("transformers")
    policy = CausalPolicy(load_model(model_folder(tmp_path / "gpt2", "gpt2"))[0], CAUSAL)
    reference, before = policy.frozen(), policy.frozen().weights()
    for p in policy.parameters():
        p.add_(1.0)
    move_reference(reference, policy, 1, config(reference_mode="ema", ema_alpha=0.9))
    for name, x in reference.weights().items():
        torch.testing.assert_close(x, before[name] + 0.1, rtol=1e-4, atol=1e-5)


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


ADDED = {"k1": lambda logp, ref_logp: logp - ref_logp,  # those that a config may add
         "own weight": lambda logp, ref_logp, ratio: ratio.detach() * (logp - ref_logp) ** 2 / 2}


@pytest.fixture(autouse=True)
def added_estimators(monkeypatch):
    for name, estimator in ADDED.items():
        monkeypatch.setitem(KL_ESTIMATORS, name, estimator)


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("estimator", ["k2", "k3", *ADDED])
def test_in_the_loss_the_expected_gradient_is_that_of_the_kl_of_each_token(name, estimator, on_policy):
    """Over all that the sampler can write, also where the ratio of the surrogate is that of the sequence."""
    table = Table()
    logp, teacher = table.logp()
    old = logp.detach() if on_policy else Table(seed=1).logp()[0].detach()
    p = old.sum(1, keepdim=True).exp()                                               # (9, 1)
    _, ratio, _ = policy_loss(logp, old, 0 * p, p.expand(9, 2), OBJECTIVES[name])
    kl = kl_per_token(Scores(logp, None), rolled(old, teacher), estimator, ratio)
    torch.testing.assert_close(table.gradient(kl_penalty(kl, p, 0.7)), table.gradient((0.7 * table.exact() * p).sum()))


def test_the_row_of_an_objective_may_name_an_estimator(prompts, monkeypatch):
    found = []
    for estimator in ("k1", "exact"):
        monkeypatch.setitem(OBJECTIVES, "mine", replace(OBJECTIVES["grpo"], kl_estimator=estimator))
        for c in (prompt_config(objective="mine"), prompt_config(kl_estimator=estimator)):
            found.append(step_gradient(causal_policy(seed=1), causal_policy(seed=2).frozen(),
                                       fixed_rewards(torch.ones(4, 4)), prompt_consumer(prompts, c), c))
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    assert (found[0] - found[2]).norm() > 0.01 * found[0].norm() > 0


# A teacher

@pytest.mark.parametrize("size", [1, 4])
def test_without_rewards_the_teacher_alone_teaches(prompts, size):
    c = config(teacher_checkpoint="passed below", kl_beta=0.0, distill_beta=0.7, max_new_tokens=6, group_size=size)
    policy, teacher = causal_policy(seed=1), causal_policy(seed=2).frozen()
    metrics = grpo_step(policy, teacher, Rewards(c), prompt_consumer(prompts, c), c)
    assert metrics["mean_kl"] > 0.01 and metrics["grad_norm"] > 0 and metrics["empty_steps"] == 0
    assert metrics["loss"] == metrics["kl_penalty"] == pytest.approx(0.7 * metrics["mean_kl"], rel=0.2)
    assert metrics["mean_reward"] == metrics["pg_loss"] == 0
