"""The test vectors are what loops from the papers make, for every objective and estimator."""

import itertools
import json

import pytest
import torch

from grpo.losses import OBJECTIVES
from grpo.tools.check_loss import SETS, load_step
from tests.vectors.make import HERE, again, vectors

STEPS = {name: load_step(name) for name in SETS}
FAMILIES = set(itertools.product(OBJECTIVES, ["none", "k2", "k3"]))  # before a test defines an objective


def test_the_vectors_hold_every_objective_and_every_estimator():
    for step in STEPS.values():
        assert {(name, case["kl"]) for case in step.expected for name in case["objectives"]} == FAMILIES


def equal(case, stored):
    """Checks a case that was made now against the stored one."""
    stored = dict(stored)
    for key in ("loss", "gradient"):
        torch.testing.assert_close(torch.tensor(case.pop(key)), torch.tensor(stored.pop(key)))
    assert case.items() <= stored.items()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("folder", ["", "v2"])
def test_the_losses_of_both_versions_are_those_of_the_loops(folder, name):
    step = json.loads((HERE / folder / f"{name}.json").read_text())
    for case in step["expected"]:
        equal(again(step, case), case)


def test_the_files_are_what_the_loops_make():
    for name, made in vectors().items():
        stored = json.loads((HERE / "v2" / f"{name}.json").read_text())
        for case, other in zip(made["expected"], stored["expected"], strict=True):
            equal(case, other)
        for key in stored.keys() - {"advantages", "expected"}:
            assert made[key] == stored[key], key


@pytest.mark.parametrize("name", SETS)
def test_ratios_are_far_on_both_sides(name):
    """Else a loss without a bound would have the right gradient."""
    step = STEPS[name]
    ratio = (step.logp - step.old_logp).exp()
    for sign in (1, -1):
        counted = ratio[(step.mask > 0) & (sign * step.A > 0)]
        assert 7 < counted.max() < 8 and counted.min() < 0.2
