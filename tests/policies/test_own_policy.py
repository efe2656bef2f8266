"""A policy of another kind, in forty lines: the proof that the algorithm needs nothing but the interface."""

import copy
import io
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from core.errors import Mistake
from core.optim import build_optimizers
from grpo.grpo_training_step import grpo_training_step
from grpo.losses import OBJECTIVES
from grpo.rewards import Scored
from grpo.policies.policy import Policy
from grpo.rollout import DataBuffer, Inputs, Rollouts, Texts
from grpo.sampling_settings import SamplingSettings
from grpo.sums import Sums
from tests.tiny import config, one_process

PROMPTS, TOKENS, LENGTH = 6, 5, 3


@dataclass(slots=True)  # of which no `vars` would tell
class TableInputs(Inputs):
    prompt: torch.Tensor  # (P,) the row of the table


class TablePolicy(Policy, torch.nn.Module):
    """A table of logits: for each prompt and place, the distribution of the token that is written there."""
    inputs_type = TableInputs
    kl_estimator, vocabulary, suffix, device = "exact", TOKENS, ".table", torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(PROMPTS, LENGTH, TOKENS))

    def sample(self, problems, iteration, settings):
        prompt, G = torch.as_tensor(problems["number"]), settings.group_size
        logp = (self.table.detach()[prompt] / settings.temperature).log_softmax(-1).repeat_interleave(G, 0)  # (N, L, V)
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


def table_rollouts():
    policy = TablePolicy()
    return policy, policy.sample({"number": range(PROMPTS)}, 0, SamplingSettings.of(config()))


def test_its_inputs_come_back_from_a_state_that_holds_plain_values():
    policy, rollouts = table_rollouts()
    rollouts = replace(rollouts, texts=None, advantage=rollouts.mask)
    with torch.no_grad():
        rollouts.inputs.reference = list(policy.distributions(rollouts, 1.0))
    buffer, file = DataBuffer(), io.BytesIO()
    buffer.prepare_training_batch(buffer.store_rollout_data(rollouts, Sums()), minibatches=2)
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    state, other = torch.load(file, weights_only=True), DataBuffer()
    other.load_state_dict(state, inputs_type=policy.inputs_type)
    for _ in range(2):
        (found, _), (expected, _) = other.next_minibatch(), buffer.next_minibatch()
        assert torch.equal(found.inputs.prompt, expected.inputs.prompt) and found.inputs.kept is None
        assert torch.equal(torch.cat(found.inputs.reference), torch.cat(expected.inputs.reference))
    with pytest.raises(Mistake, match="prompt.*Inputs.*inputs_type"):
        DataBuffer().load_state_dict(state)


def test_inputs_as_a_dictionary_are_refused_in_one_line():
    _, rollouts = table_rollouts()
    with pytest.raises(Mistake, match="^[^\n]*dict[^\n]*grpo.rollout.Inputs[^\n]*$"):
        replace(rollouts, inputs=vars(rollouts.inputs))


@pytest.mark.parametrize("wrong", [np.arange(6), tuple(range(6)), [1, 2]], ids=str)
def test_a_field_of_inputs_that_cannot_be_selected_by_problem_is_refused(wrong):
    _, rollouts = table_rollouts()
    with pytest.raises(Mistake, match="^[^\n]*prompt[^\n]*$"):
        replace(rollouts.inputs, prompt=wrong)


@pytest.mark.parametrize("name", ["mean_reward", "loss", "grad_norm", "mismatch_kl", "effective_sample_size"])
def test_a_metric_of_a_policy_with_the_name_of_another_is_refused(name):
    class Measured(TablePolicy):
        def sample(self, problems, iteration, settings):
            rollouts = super().sample(problems, iteration, settings)
            rollouts.texts.metrics[name] = 1000.0, 1
            return rollouts

    policy, c = Measured(), config(group_size=4, batch_size=PROMPTS, kl_beta=0.0)
    with pytest.raises(Mistake, match=name):
        grpo_training_step(policy, None, share_of_last_token, lambda again: {"number": range(PROMPTS)}, [], 0, c,
                           one_process())


@pytest.mark.parametrize("shape", [(24,), (1, 24), (24, 1), (4, 6), (3, 4)], ids=str)
def test_rewards_of_another_shape_are_refused(shape):
    policy, c = TablePolicy(), config(group_size=4, batch_size=PROMPTS, kl_beta=0.0)
    scored = Scored(torch.rand(shape), credit=torch.rand(6, 4, 1))
    with pytest.raises(Mistake, match="^[^\n]*6, 4[^\n]*$"):
        grpo_training_step(policy, None, lambda rollouts: scored, lambda again: {"number": range(PROMPTS)}, [], 0, c,
                           one_process())


@pytest.mark.parametrize(("settings", "said"), [
    ({"kl_beta": 0.1}, pytest.warns(UserWarning, match="kl_beta=0.1")),
    ({"kl_beta": 0.1, "kl_in_reward": True}, pytest.raises(Mistake, match="kl_in_reward"))], ids=["loss", "reward"])
def test_a_kl_without_a_reference_is_told(settings, said):
    policy, c = TablePolicy(), config(group_size=4, batch_size=PROMPTS, **settings)
    with said:
        grpo_training_step(policy, None, share_of_last_token, lambda again: {"number": range(PROMPTS)}, [], 0, c,
                           one_process())
