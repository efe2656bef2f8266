"""What the tests of the objectives share: rollouts of a policy that is a table of logits."""

import dataclasses

import torch

from grpo.grpo_training_step import with_advantage as compared
from grpo.rewards import Scored
from grpo.policies.policy import Policy
from grpo.rollout import Inputs, Rollouts
from tests.tiny import config, one_process, shaped

G, P, M, V, MAX_TOKENS = 4, 3, 5, 7, 8
N = P * G


@dataclasses.dataclass
class TableInputs(Inputs):
    completion: torch.Tensor  # (P, G) its row of the table


class Table(Policy, torch.nn.Module):
    """A policy whose logits are its parameters: (N, M, V), for each completion a row."""

    vocabulary, kl_estimator = V, "k3"

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def states(self, rollouts):
        return self.logits[rollouts.inputs.completion.flatten()][rollouts.inputs.chosen.flatten(0, 1)]  # (K, V)

    def project(self, states):
        return states


def table_rollouts():
    """A policy, rollouts of unequal lengths that another policy wrote, the log-probabilities of a reference (N, M, V),
    and rewards (P, G)."""
    g = torch.Generator().manual_seed(11)
    logits, ref = (torch.randn(N, M, V, dtype=torch.float64, generator=g) for _ in range(2))
    old = (logits + 0.3 * torch.randn(N, M, V, dtype=torch.float64, generator=g)).log_softmax(-1)
    target = torch.randint(V, (N, M), generator=g)
    lengths = torch.randint(1, M + 1, (N,), generator=g)
    mask = (torch.arange(M) < lengths[:, None]).double()
    inputs = TableInputs(torch.arange(N).view(P, G), chosen=mask.view(P, G, M) > 0)
    rollouts = Rollouts(target=target, mask=mask, train_mask=mask, max_tokens=MAX_TOKENS, inputs=inputs,
                        old_logp=old.gather(-1, target[..., None])[..., 0],
                        truncated=torch.zeros(N, dtype=torch.bool))
    return Table(logits), rollouts, ref.log_softmax(-1), torch.rand(P, G, dtype=torch.float64, generator=g)


def objective_config(name, estimator, **more):
    """A config for table_rollouts. estimator: of the KL, "none", "in reward", or its name."""
    named = estimator not in ("none", "in reward")
    return config(objective=name, kl_beta=0.0 if estimator == "none" else 0.3, kl_in_reward=estimator == "in reward",
                  batch_size=P, group_size=G, max_new_tokens=MAX_TOKENS, kl_estimator=estimator if named else None,
                  **more)


def with_advantage(estimator, rollouts, reference, reward, c):
    """The rollouts after the phases of a step before the loss."""
    chosen = reference.gather(-1, rollouts.target[..., None])[..., 0]
    if estimator == "exact":
        rollouts.inputs.reference = [reference[rollouts.inputs.chosen.flatten(0, 1)]]
    elif estimator != "none":
        rollouts = dataclasses.replace(rollouts, ref_logp=chosen)
    rollouts, scored = shaped(rollouts, Scored(reward), c)
    return compared(rollouts, scored, c.baseline, one_process())
