"""The file that teaches computes what the project computes, and learns."""

import importlib.util
import pathlib
import re
import types
from dataclasses import dataclass

import pytest
import torch

from grpo.losses import OBJECTIVES, compute_advantages, token_weights
from grpo.policies.policy import Policy
from grpo.rollout import Inputs, Rollouts
from tests.tiny import ROOT, config, loss_of


def loaded(name):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(ROOT, "docs", f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["script", "cells"])
def one_file(request):
    """The names that the file defines, as a script or in a notebook: one cell after another."""
    module = loaded("grpo_in_one_file")
    if request.param == "cells":
        names = {"__name__": "notebook"}
        for cell in re.split("^# %%.*$", pathlib.Path(module.__file__).read_text(), flags=re.M):
            exec(cell, names)
        return types.SimpleNamespace(**names)
    return module


@dataclass
class TextInputs(Inputs):
    tokens: torch.Tensor  # (P, G, T) prompts and completions


class ProjectPolicy(Policy):
    """The transformer of the file, as the project's algorithm sees a policy."""
    kl_estimator, vocabulary = "k3", 13

    def __init__(self, model, prompt):
        self.model, self.prompt = model, prompt

    def states(self, rollouts):
        logits = self.model(rollouts.inputs.tokens.flatten(0, 1)[:, :-1])[:, self.prompt - 1:]              # (N, L, V)
        return logits[rollouts.inputs.chosen.flatten(0, 1)]                            # (K, V)

    def project(self, states):
        return states


def gradients(model):
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def test_its_loss_and_gradient_are_the_project_s_on_the_same_tokens(one_file):
    torch.manual_seed(1)
    policy, old, reference = (one_file.Policy() for _ in range(3))
    pairs, G = [(7, 85), (40, 2), (99, 99), (0, 0)], 6
    prompts = one_file.prompts_of(pairs)
    completions, mask = one_file.sample(old, prompts, G)
    assert 0 < mask.mean() < 1                                           # some completions end before the others
    rewards = torch.rand(len(pairs), G)
    old_logp, ref_logp = (one_file.log_probabilities(m, prompts, completions).detach() for m in (old, reference))
    logp = one_file.log_probabilities(policy, prompts, completions)
    loss = one_file.grpo_loss(logp, old_logp, ref_logp, one_file.advantages_of(rewards), mask)
    loss.backward()
    by_hand = gradients(policy)

    c = config(objective="grpo", kl_estimator="k3", temperature=1.0, kl_beta=one_file.KL_BETA,
               group_size=G)
    tokens = torch.cat((prompts.repeat_interleave(G, 0), completions), 1)
    inputs = TextInputs(tokens.view(len(pairs), G, -1), chosen=mask.view(len(pairs), G, -1) > 0)
    advantage = compute_advantages(rewards[..., None], OBJECTIVES["grpo"].advantage).flatten(0, 1)
    rollouts = Rollouts(completions, mask, mask, old_logp, mask[:, 0] > 1, one_file.ANSWER, inputs, None,
                        ref_logp=ref_logp, advantage=advantage)
    weight = token_weights(mask, OBJECTIVES["grpo"].average, one_file.ANSWER)
    project_loss, sums = loss_of(ProjectPolicy(policy, one_file.PROMPT), rollouts, weight, c)
    project_loss.backward()
    assert sums["clip_fraction"][0] > 0                                     # the policies differ enough to be clipped
    torch.testing.assert_close(project_loss, loss)
    for theirs, mine in zip(gradients(policy), by_hand, strict=True):
        torch.testing.assert_close(theirs, mine, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("one_file", ["cells"], indirect=True)
def test_it_learns_from_rewards(one_file):
    before, after = one_file.main(grpo_steps=20)
    assert 0.05 < before < 0.9 and after > before + 0.05
