"""A policy of another kind, in forty lines: the proof that the algorithm needs nothing but the interface."""

import copy
from dataclasses import dataclass

import pytest
import torch

from core.optim import build_optimizers
from grpo.grpo_training_step import grpo_training_step
from grpo.losses import OBJECTIVES
from grpo.rewards import Scored
from grpo.policies.policy import Policy
from grpo.rollout import Inputs, Rollouts, Texts
from tests.tiny import config, one_process

PROMPTS, TOKENS, LENGTH = 6, 5, 3


@dataclass
class TableInputs(Inputs):
    prompt: torch.Tensor  # (P,) the row of the table


class TablePolicy(Policy, torch.nn.Module):
    """A table of logits: for each prompt and place, the distribution of the token that is written there."""
    inputs_type = TableInputs
    kl_estimator, vocabulary, suffix, device = "exact", TOKENS, ".table", torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(PROMPTS, LENGTH, TOKENS))

    def sample(self, problems, iteration, config):
        prompt, G = torch.as_tensor(problems["number"]), config.group_size
        logp = (self.table.detach()[prompt] / config.temperature).log_softmax(-1).repeat_interleave(G, 0)  # (N, L, V)
        noise = torch.rand(logp.shape, generator=torch.Generator().manual_seed(iteration))
        target = (logp - (-noise.log()).log()).argmax(-1)                            # (N, L) Gumbel-max
        mask = torch.ones(target.shape)
        return Rollouts(target, mask, mask, logp.gather(-1, target[..., None])[..., 0], mask[:, 0] > 1, LENGTH,
                        TableInputs(prompt, chosen=torch.ones(len(prompt), 1, LENGTH) > 0),
                        Texts([], [], {}, [], target.tolist(), None, {}))

    def states(self, rollouts):
        return self.table[rollouts.inputs.prompt].flatten(0, 1)                      # (P * L, V): a group shares them

    def project(self, states):
        return states

    def frozen(self):
        return copy.deepcopy(self).requires_grad_(False)

    def parameters_by_kind(self):
        return {"matrices": [], "embeddings": list(self.parameters()), "vectors": []}

    def save(self, path, **facts):
        torch.save(self.state_dict() | facts, path)

    weights, load_weights = torch.nn.Module.state_dict, torch.nn.Module.load_state_dict


def share_of_last_token(rollouts):
    return Scored((rollouts.target == TOKENS - 1).float().mean(1).view(-1, rollouts.group_size))


@pytest.mark.parametrize("objective, kl_estimator", [*((objective, "k3") for objective in OBJECTIVES),
                                                     ("grpo", "exact"), ("grpo", "k2")])
def test_a_table_of_logits_trains_with_the_whole_zoo(objective, kl_estimator):
    c = config(group_size=8, batch_size=PROMPTS, learning_rate=0.1, kl_beta=0.01, objective=objective,
               kl_estimator=kl_estimator)
    policy = TablePolicy()
    optimizers, reference = build_optimizers(policy, c), policy.frozen()
    for step in range(60):
        metrics = grpo_training_step(policy, reference, share_of_last_token, lambda again: {"number": range(PROMPTS)},
                                     optimizers, step, c, one_process())
    assert policy.table.softmax(-1)[..., -1].mean() > 0.8 and metrics["mean_reward"] > 0.7
    assert metrics["mean_kl"] > 0 and metrics["skipped_steps"] == 0
