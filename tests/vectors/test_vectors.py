"""Our own losses on the test vectors, which loops from the papers made."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from grpo.losses import (ADVANTAGES, KL_ESTIMATORS, OBJECTIVES, Objective, compute_advantages, kl_penalty, kl_per_token,
                         policy_loss, token_weights)
from grpo.tools.check_loss import SETS, load_step
from tests.vectors.make import GROUP, HERE, vectors

STEPS = {name: load_step(name) for name in SETS}
FAMILIES = set(itertools.product(OBJECTIVES, ["none", *KL_ESTIMATORS]))  # before a test defines an objective


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name, i", [(name, i) for name, step in STEPS.items() for i in range(len(step.expected))])
def test_our_losses_are_those_of_the_vectors(name, i, cut):
    step, case, loss = STEPS[name], STEPS[name].expected[i], 0.0
    objective = Objective("", "", step.advantage, case["average"], case["ratio"], case["surrogate"],
                          case["clip_low"], case["clip_high"])
    weight = token_weights(step.mask, case["average"], step.max_tokens)
    for rows in step.parts if cut else [slice(None)]:
        logp, ref_logp = step.logp[rows], step.ref_logp[rows]
        part, ratio, _ = policy_loss(logp, step.old_logp[rows], step.A[rows], weight[rows], objective)
        loss = loss + part
        if case["kl"] != "none":
            kl = kl_per_token(SimpleNamespace(logp=logp), SimpleNamespace(ref_logp=ref_logp), case["kl"], ratio)
            loss = loss + kl_penalty(kl, weight[rows], case["kl_beta"])
    gradient, = torch.autograd.grad(loss, step.logp)
    torch.testing.assert_close(loss.item(), case["loss"])
    torch.testing.assert_close(gradient, torch.tensor(case["gradient"], dtype=torch.float64))


@pytest.mark.parametrize("name", STEPS)
def test_our_advantages_are_those_of_the_vectors(name):
    step = STEPS[name]
    assert step.advantages.keys() == ADVANTAGES.keys()
    for advantage, values in step.advantages.items():
        found = compute_advantages(torch.tensor(step.reward, dtype=torch.float64).view(-1, GROUP, 1), advantage)
        torch.testing.assert_close(found.flatten(), torch.tensor(values, dtype=torch.float64))


def test_the_vectors_hold_every_objective_and_every_estimator():
    for step in STEPS.values():
        assert {(name, case["kl"]) for case in step.expected for name in case["objectives"]} == FAMILIES


def test_the_files_are_what_the_loops_make():
    for name, made in vectors().items():
        stored = json.loads((HERE / f"{name}.json").read_text())
        for case, other in zip(made["expected"], stored["expected"], strict=True):
            for key in ("loss", "gradient"):
                torch.testing.assert_close(torch.tensor(case[key]), torch.tensor(other.pop(key)))
            assert other.items() <= case.items()
        for key in stored.keys() - {"advantages", "expected"}:
            assert made[key] == stored[key], key
