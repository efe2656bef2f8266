"""Two ranks are one rank with twice the batch, or with twice the accumulation. A number that is not finite on one of
them makes both skip the step."""

import os

import pytest
import torch

from grpo.losses import OBJECTIVES
from tests.tiny import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(dataset, prompts, tmp_path_factory):
    """(path of the results, stdout of the two ranks)."""
    out = tmp_path_factory.mktemp("ranks") / "of"
    two = run_script("tests/runs/rank_worker.py", dataset, prompts, out, "4x1", ranks=2)
    assert two.returncode == 0, two.stderr
    for rank in (0, 1):
        os.rename(f"{out}-4x1-{rank}.pt", f"{out}-two-{rank}.pt")
    one = run_script("tests/runs/rank_worker.py", dataset, prompts, out, "8x1", "4x2")
    assert one.returncode == 0, one.stderr
    return out, two.stdout


@pytest.fixture(scope="module")
def layouts(ranks):
    return {name: torch.load(f"{ranks[0]}-{name}.pt") for name in ("two-0", "two-1", "8x1-0", "4x2-0")}


def test_both_ranks_hold_the_same_weights(layouts):
    for name, weights in layouts["two-0"].items():
        assert torch.equal(weights, layouts["two-1"][name]), name


@pytest.mark.parametrize("other", ["8x1-0", "4x2-0"])
def test_two_ranks_equal_one(layouts, other):
    for name, weights in layouts["two-0"].items():
        if name.startswith("alone"):  # the problems that replace others depend on the rank
            continue
        expected = layouts[other][name]
        if name.endswith("last"):  # Adam makes a full step of a gradient that is rounding alone: compare the way gone
            way = expected - layouts[other][name.replace("last", "first")]
            assert way.abs().max() > 1e-3 and (weights - expected).norm() < 0.02 * way.norm(), name
        elif name == "supervised":  # the way gone in ten steps of Muon, which computes in bfloat16
            assert (weights - expected).norm() < 0.02 * expected.norm()
        else:
            scale = 1.0 if name.endswith(("first", "metrics")) else float(expected.abs().max())
            torch.testing.assert_close(weights, expected, rtol=1e-4, atol=2e-5 * scale,
                                       msg=lambda m, n=name: f"{n}: {m}")


def test_the_steps_that_were_compared_did_something(layouts):
    """Later steps left the ratio of 1 and were clipped; sampler and policy differed."""
    clipped = {}
    for name, metrics in layouts["8x1-0"].items():
        if name.endswith("/metrics") and name.startswith(("causal", "passes")):
            mismatch_kl, clip_fraction, kl_to_old = metrics[[8, -2, -1]].tolist()
            assert kl_to_old > 1e-4 and mismatch_kl > 0, name
            clipped[name.split("/")[1]] = clipped.get(name.split("/")[1], 0.0) + clip_fraction
    assert all(clipped[name] > 0 for name in OBJECTIVES if name not in ("cispo", "dppo")), clipped


def test_a_step_is_empty_only_if_no_rank_has_a_group(layouts):
    for name, ranks in (("two-0", 2), ("8x1-0", 1)):
        empty_steps = layouts[name]["alone/empty_steps"].tolist()
        assert empty_steps == [float(ranks == 1), 1.0], "groups on rank 1 alone, groups on no rank"


@pytest.fixture(scope="module")
def bad(ranks):
    return [torch.load(f"{ranks[0]}-bad-{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_both_ranks_skip_a_step_that_one_cannot_take(bad):
    names = [name for name in bad[0] if name not in ("nothing", "run")]
    assert names == ["reward", "gradient", "loss"] and bad[0].keys() == bad[1].keys()
    for found in bad:
        for name in names:
            assert found[name]["skipped_steps"] == 1 and not found[name]["moved"], name
        assert found["nothing"]["skipped_steps"] == 0 and found["nothing"]["moved"], "two ranks do train"


def test_a_run_goes_on_after_it_and_the_ranks_stay_equal(ranks, bad):
    _, shown = ranks
    assert torch.equal(bad[0]["run"]["weights"], bad[1]["run"]["weights"])
    for found in bad:
        assert (found["run"]["skipped_steps"], found["run"]["step"], found["run"]["iteration"]) == (1, 6, 3)
    assert shown.count("step 3 is skipped") == 1
