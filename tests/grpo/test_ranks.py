"""Two ranks are one rank with twice the batch, or with twice the accumulation."""

import pytest
import torch

from grpo.advantages import ADVANTAGES
from grpo.objectives import OBJECTIVES
from grpo.policies.fill_views import FILL_ESTIMATORS
from tests.tiny import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def layouts(dataset, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name, ranks, batch_size, accumulation in (("two", 2, 4, 1), ("wide", 1, 8, 1), ("long", 1, 4, 2)):
        done = run_script("tests/grpo/rank_worker.py", dataset, prompts, folder / name, batch_size, accumulation,
                          ranks=ranks)
        assert done.returncode == 0, done.stderr
    return {name: torch.load(folder / f"{name}.pt") for name in ("two-0", "two-1", "wide-0", "long-0")}


def test_both_ranks_hold_the_same_weights(layouts):
    for name, weights in layouts["two-0"].items():
        assert torch.equal(weights, layouts["two-1"][name]), name


@pytest.mark.parametrize("other", ["wide-0", "long-0"])
def test_two_ranks_equal_one(layouts, other):
    choices = len(OBJECTIVES) + len(ADVANTAGES)
    later = choices * 7 + len(FILL_ESTIMATORS) + 1
    assert len(layouts["two-0"]) == choices * 2 * 3 + later * 2 + 8 + 3 + 2, (
        "fill-in x windows, later steps, mismatches, steps ahead, a step with groups on one rank alone, supervised")
    for name, weights in layouts["two-0"].items():
        if name.startswith("alone"):  # the problems that replace others depend on the rank
            continue
        expected = layouts[other][name]
        if name.endswith("last"):  # Adam makes a full step of a gradient that is rounding alone: compare the way gone
            travelled = (expected - layouts[other][name.replace("last", "first")]).norm()
            assert (weights - expected).norm() < 0.02 * travelled, name
        elif name == "supervised":  # the way gone in ten steps of Muon, which computes in bfloat16
            assert (weights - expected).norm() < 0.02 * expected.norm()
        else:
            scale = 1.0 if name.endswith(("first", "metrics")) else float(expected.abs().max())
            torch.testing.assert_close(weights, expected, rtol=1e-4, atol=2e-5 * scale,
                                       msg=lambda m, n=name: f"{n}: {m}")


def test_the_later_steps_left_the_ratio_of_one(layouts):
    clipped = {}
    for name, metrics in layouts["wide-0"].items():
        if name.endswith("/metrics") and name.startswith(("causal", "passes")):
            clip_fraction, kl_to_old = metrics[-2:].tolist()
            assert kl_to_old > 1e-4, name
            clipped[name.split("/")[1]] = clipped.get(name.split("/")[1], 0.0) + clip_fraction
    assert all(clipped[name] > 0 for name in OBJECTIVES if name != "cispo"), clipped


def test_importance_weights_exceeded_their_bounds_in_a_part_of_the_step(layouts):
    token, sequence = (layouts["wide-0"][f"mismatch/{i}/metrics"][-2:].tolist() for i in (2, 3))
    assert 0.1 < token[0] < 0.9 and token[1] == 0
    assert 0.1 < sequence[1] < 0.9


def test_rollouts_of_an_iteration_ago_were_trained_on(layouts):
    assert layouts["two-0"]["ahead/metrics"][:2].tolist() == [1.0, 0.0]


def test_five_steps_went_somewhere(layouts):
    for name, weights in layouts["wide-0"].items():
        if name.endswith("last"):
            assert (weights - layouts["wide-0"][name.replace("last", "first")]).abs().max() > 1e-3


def test_a_step_is_empty_only_if_no_rank_has_a_group(layouts):
    for name, ranks in (("two-0", 2), ("wide-0", 1)):
        empty_steps = layouts[name]["alone/empty_steps"].tolist()
        assert empty_steps == [float(ranks == 1), 1.0], "groups on rank 1 alone, groups on no rank"
