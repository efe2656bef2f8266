"""The test vectors are what loops from the papers make, for every objective and estimator."""

import itertools
import json

import torch

from grpo.losses import KL_ESTIMATORS, OBJECTIVES
from grpo.tools.check_loss import SETS, load_step
from tests.vectors.make import HERE, vectors

STEPS = {name: load_step(name) for name in SETS}
FAMILIES = set(itertools.product(OBJECTIVES, ["none", *KL_ESTIMATORS]))  # before a test defines an objective


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
