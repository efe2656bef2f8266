"""Our own losses on the test vectors, which loops from the papers made."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from grpo.losses import (ADVANTAGES, KL_ESTIMATORS, OBJECTIVES, Objective, compute_advantages, kl_penalty, kl_per_token,
                         policy_loss, token_weights)
from grpo.tools.check_loss import SETS
from tests.vectors.make import GROUP, HERE, vectors

STEPS = {name: json.loads((HERE / f"{name}.json").read_text()) for name in SETS}
CASES = [(name, i) for name, step in STEPS.items() for i in range(len(step["expected"]))]


def case_of(name, i):
    """(the inputs as tensors, logp with a gradient; the case; its mask and its advantages (N, 1))"""
    step = STEPS[name]
    tensors = {key: torch.tensor(step[key], dtype=torch.float64) for key in ("logp", "old_logp", "ref_logp", "mask")}
    tensors["logp"].requires_grad_()
    advantage = torch.tensor(step["advantages"][step["advantage"]], dtype=torch.float64)[:, None]
    return tensors, step["expected"][i], advantage


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name, i", CASES)
def test_our_losses_are_those_of_the_vectors(name, i, cut):
    x, case, advantage = case_of(name, i)
    step = STEPS[name]
    objective = Objective("", "", step["advantage"], case["average"], case["ratio"], case["surrogate"],
                          case["clip_low"], case["clip_high"])
    weight, loss = token_weights(x["mask"], case["average"], step["max_tokens"]), 0.0
    parts = list(itertools.chain(*step["parts"]))
    for rows in parts if cut else [list(range(len(advantage)))]:
        logp = x["logp"][rows]
        part, ratio, _ = policy_loss(logp, x["old_logp"][rows], advantage[rows], weight[rows], objective)
        loss = loss + part
        if case["kl"] != "none":
            scores, rollouts = SimpleNamespace(logp=logp), SimpleNamespace(ref_logp=x["ref_logp"][rows])
            kl = kl_per_token(scores, rollouts, case["kl"], ratio)
            loss = loss + kl_penalty(kl, weight[rows], case["kl_beta"])
    loss.backward()
    torch.testing.assert_close(loss.item(), case["loss"])
    torch.testing.assert_close(x["logp"].grad, torch.tensor(case["gradient"], dtype=torch.float64))


@pytest.mark.parametrize("name", STEPS)
def test_our_advantages_are_those_of_the_vectors(name):
    reward = torch.tensor(STEPS[name]["reward"], dtype=torch.float64).view(-1, GROUP, 1)
    assert STEPS[name]["advantages"].keys() == ADVANTAGES.keys()
    for advantage, values in STEPS[name]["advantages"].items():
        found = compute_advantages(reward, advantage).flatten()
        torch.testing.assert_close(found, torch.tensor(values, dtype=torch.float64))


def test_the_vectors_hold_every_objective_and_every_estimator():
    for step in STEPS.values():
        families = {(name, case["kl"]) for case in step["expected"] for name in case["objectives"]}
        assert families == set(itertools.product(OBJECTIVES, ["none", *KL_ESTIMATORS]))


def test_the_files_are_what_the_loops_make():
    made = vectors()
    assert made.keys() == STEPS.keys()
    for name, step in made.items():
        for case, stored in zip(step.pop("expected"), STEPS[name]["expected"], strict=True):
            for key in ("loss", "gradient"):
                torch.testing.assert_close(torch.tensor(case.pop(key)), torch.tensor(stored[key]))
            assert case.items() <= stored.items()
        assert step.pop("advantages").keys() == STEPS[name]["advantages"].keys()
        assert step.items() <= STEPS[name].items()
