"""The gradient of a GRPO step: against loops, finite differences and enumeration, and the same however it is cut."""

import itertools
import math

import pytest
import torch

from core.distributions import restrict, sampling_logp
from core.truncation import kept_tokens
from grpo.grpo_training_step import grpo_training_step
from grpo.losses import ADVANTAGES, OBJECTIVES, compute_advantages, token_weights
from grpo.reference import with_reference
from grpo.rewards import Rewards
from grpo.policies.policy import Policy
from grpo.rollout import Rollouts, Texts
from tests.tiny import (Catcher, causal_policy, clear_gradient, config, consumer, fill_policy, flat_gradient,
                        judge, length_reward, loss_of, one_process, prompt_config, prompt_consumer, rewards,
                        sampled, step_gradient)

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_gradient_equals_that_of_every_completion_forwarded_on_its_own(dataset, objective):
    c = config(objective=objective, kl_beta=0.3, temperature=0.7, top_p=0.9)
    policy, reference, scorer, data = fill_policy(seed=1), fill_policy(seed=2).frozen(), judge(), consumer(dataset, c)
    shared = step_gradient(policy, reference, rewards(c, scorer), data, c)

    problems = data.problems("train", 0)
    rollouts, inputs = policy.sample(problems, 0, c), torch.from_numpy(problems["input"])
    reward = rewards(c, scorer)(rollouts).reward[..., None]
    advantage = compute_advantages(reward, OBJECTIVES[objective].advantage).flatten()
    N, loss = len(advantage), 0.0
    for n in range(N):
        i = n // c.group_size
        policy_logits, ref_logits = policy.model(inputs[i : i + 1])[0], reference.model(inputs[i : i + 1])[0]
        hidden = torch.from_numpy(problems["mask"][i]).nonzero().flatten().tolist()
        share = {"sequence": 1 / len(hidden) / N, "constant": 1 / c.block_size / N, "sum": 1 / N,
                 "token": 1 / float(rollouts.mask.sum())}[OBJECTIVES[objective].average]
        for m, where in enumerate(hidden):
            drawn = sampling_logp(policy_logits[where], c.temperature)
            drawn = restrict(drawn, kept_tokens(drawn, c.top_p))[rollouts.target[n, m]]
            p = (policy_logits[where] / c.temperature).log_softmax(-1)
            q = (ref_logits[where] / c.temperature).log_softmax(-1)
            kl = (p.exp() * (p - q)).sum()
            loss = loss + share * (-advantage[n] * drawn + c.kl_beta * kl)
    clear_gradient(policy)
    loss.backward()
    naive = flat_gradient(policy)
    assert (shared - naive).norm() / naive.norm() < 1e-5


@pytest.mark.parametrize("objective, advantage", [*((objective, None) for objective in OBJECTIVES),
                                                  *(("grpo", advantage) for advantage in ADVANTAGES)])
@pytest.mark.parametrize("credit_window", [None, 3])
def test_the_gradient_does_not_depend_on_the_micro_batch(dataset, objective, advantage, credit_window):
    if advantage == "max_rl" and credit_window:
        pytest.skip("it is refused: max_rl is for rewards of success")
    choice = {"objective": objective, "advantage": advantage, "credit_window": credit_window}
    policy, reference, scorer, found = fill_policy(seed=1), fill_policy(seed=2).frozen(), judge(), []
    for c in (config(batch_size=8, **choice), config(batch_size=2, gradient_accumulation_steps=4, **choice)):
        found.append(step_gradient(policy, reference, rewards(c, scorer), consumer(dataset, c), c))
    assert (found[0] - found[1]).norm() / found[0].norm() < 1e-5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_on_prompts_the_gradient_does_not_depend_on_the_micro_batch(prompts, objective):
    found, policy, reference = [], causal_policy(seed=1), causal_policy(seed=2).frozen()
    for batch_size, accumulate in ((4, 1), (1, 4), (2, 2)):
        c = prompt_config(objective=objective, batch_size=batch_size, gradient_accumulation_steps=accumulate)
        found.append(step_gradient(policy, reference, length_reward, prompt_consumer(prompts, c), c))
    for other in found[1:]:
        assert (other - found[0]).norm() < 2e-5 * found[0].norm()


@pytest.mark.parametrize("settings", [{}, {"ppo_epochs": 2}, {"kl_estimator": "exact"}])
def test_the_gradient_does_not_depend_on_micro_batch_tokens(prompts, settings):
    found, read, reference = [], [], causal_policy(seed=2).frozen()
    for tokens in (None, 1, 110, 10_000):
        policy = causal_policy(seed=1)
        policy.model.embed.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
        c = prompt_config(batch_size=4, max_new_tokens=12, micro_batch_tokens=tokens, **settings)
        read.append("run")
        found.append(step_gradient(policy, reference, length_reward, prompt_consumer(prompts, c), c))
    for other in found[1:]:
        assert (other - found[0]).norm() < 2e-5 * found[0].norm()
    starts = [i for i, x in enumerate(read) if x == "run"]
    forwards = [end - start for start, end in zip(starts, starts[1:] + [len(read)], strict=True)]
    assert forwards[1] > forwards[2] > forwards[3], "the fewer tokens at a time, the more forwards"


def test_the_gradient_passes_finite_differences(dataset):
    c = config(kl_beta=0.2, objective="plain")
    policy, reference = fill_policy(seed=1, scale=4.0), fill_policy(seed=2).frozen()
    policy.model.double(), reference.model.double()
    rollouts = with_reference(sampled(policy, dataset, c), reference, "exact", c)
    rollouts.train_mask, rollouts.advantage = rollouts.mask.double(), torch.randn(len(rollouts.target), 1).double()
    weight = token_weights(rollouts.train_mask, "sum", 1)
    value = lambda: loss_of(policy, rollouts, weight, c)[0]
    value().backward()
    for name, p in policy.model.named_parameters():
        direction, h = torch.randn_like(p), 1e-6
        with torch.no_grad():
            p.add_(h * direction)
            up = value()
            p.sub_(2 * h * direction)
            down = value()
            p.add_(h * direction)
        slope, claimed = (up - down) / (2 * h), (p.grad * direction).sum()
        assert abs(claimed) > 1e-6 and abs(slope - claimed) < 1e-4 * abs(claimed) + 1e-7, name


class Coin(Policy, torch.nn.Module):
    """A policy that writes one token: 1 with probability sigmoid(logit), else 0. It writes `outcome` (G,) next."""
    vocabulary, kl_estimator = 2, "k3"

    def __init__(self, logit):
        super().__init__()
        self.logit, self.outcome = torch.nn.Parameter(torch.tensor(logit, dtype=torch.float64)), None

    def sample(self, problems, step, config):
        target = torch.tensor(self.outcome)[:, None]                                 # (G, 1)
        p, mask = self.logit.detach().sigmoid(), torch.ones(target.shape, dtype=torch.float64)
        written = [str(int(token)) for token in target]
        texts = Texts([""] * len(written), written, {"answer": ["1"] * len(written)}, [], [], None, {})
        return Rollouts(target, mask, mask, torch.where(target == 1, p, 1 - p).log(), mask[:, 0] > 1, 1,
                        {"chosen": torch.ones(1, 1, 1) > 0}, texts)

    def states(self, rollouts):
        return torch.stack((torch.zeros_like(self.logit), self.logit)).expand(rollouts.problems, 2)

    def project(self, states):
        return states


@pytest.mark.parametrize("objective", ["plain", "dr_grpo", "rloo"])
@pytest.mark.parametrize("logit", [-1.0, 0.4, 2.0])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_training_for_pass_at_k_follows_its_derivative(objective, logit, k):
    """The expectation over all outcomes of a group, from rewards to the gradient that the optimizer gets. With chance p
    of a right completion, pass@k is 1 - (1 - p)^k."""
    c = config(reward_functions=("exact_match",), task_type="general", train_pass_k=k, advantage="leave_one_out",
               objective=objective, kl_beta=0.0, max_new_tokens=1, batch_size=1)
    policy, scorer, expected = Coin(logit), Rewards(c), 0.0
    p = 1 / (1 + math.exp(-logit))
    for policy.outcome in itertools.product((0, 1), repeat=4):
        catcher, right = Catcher(policy), sum(policy.outcome)
        grpo_training_step(policy, None, scorer, lambda again: {"number": [0]}, [catcher], 0, c, one_process())
        if catcher.gradient is not None:  # the optimizer is not called where all advantages are 0
            expected += p**right * (1 - p) ** (4 - right) * -float(catcher.gradient)
    assert expected == pytest.approx(k * (1 - p) ** (k - 1) * p * (1 - p), rel=1e-5, abs=1e-5)
