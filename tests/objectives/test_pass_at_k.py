"""Training for pass@k: weights and gradients against enumeration."""

import math
from itertools import combinations, product

import pytest
import torch

from grpo.grpo_training_step import grpo_training_step
from grpo.policies.policy import Policy
from grpo.rewards import Rewards
from grpo.rollout import Inputs, Rollouts, Texts
from grpo.shaping import pass_k_weight
from tests.tiny import Catcher, config, one_process


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
                        Inputs(chosen=torch.ones(1, 1, 1) > 0), texts)

    def states(self, rollouts):
        return torch.stack((torch.zeros_like(self.logit), self.logit)).expand(rollouts.problems, 2)

    def project(self, states):
        return states


@pytest.mark.parametrize("logit", [-1.0, 0.4, 2.0])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_training_for_pass_at_k_follows_its_derivative(logit, k):
    """The expectation over all outcomes of a group, from rewards to the gradient that the optimizer gets. With chance p
    of a right completion, pass@k is 1 - (1 - p)^k."""
    c = config(reward_functions=("exact_match",), task_type="general", train_pass_k=k, advantage="leave_one_out",
               objective="rloo", kl_beta=0.0, max_new_tokens=1, batch_size=1)
    policy, scorer, expected = Coin(logit), Rewards(c), 0.0
    p = 1 / (1 + math.exp(-logit))
    for policy.outcome in product((0, 1), repeat=4):
        catcher, right = Catcher(policy), sum(policy.outcome)
        grpo_training_step(policy, None, scorer, lambda again: {"number": [0]}, [catcher], 0, c, one_process())
        if catcher.gradient is not None:  # the optimizer is not called where all advantages are 0
            expected += p**right * (1 - p) ** (4 - right) * -float(catcher.gradient)
    assert expected == pytest.approx(k * (1 - p) ** (k - 1) * p * (1 - p), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_a_weight_is_k_times_the_share_of_sets_of_others_that_are_all_wrong(k):
    groups = torch.tensor([[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1] * 6, [0] * 6,
                           [1, math.nan, 0, 0, 0, 0], [math.nan, 0, 0, math.nan, 0, 0]])
    for group, weights in zip(groups.tolist(), pass_k_weight(groups, k).tolist(), strict=True):
        for j, weight in enumerate(weights):
            others = [x for x in (*group[:j], *group[j + 1 :]) if not math.isnan(x)]
            sets = [not any(chosen) for chosen in combinations(others, k - 1)]
            expected = k * sum(sets) / len(sets) if sets else 1.0  # too few others to tell
            assert weight == pytest.approx(expected, abs=1e-6), (group, j)
