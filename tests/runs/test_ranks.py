"""Two ranks are one rank with twice the batch, or with twice the accumulation. A number that is not finite on one of
them makes both skip the step."""

import pytest
import torch

from tests.tiny import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(dataset, prompts, tmp_path_factory):
    """What the paths of the results begin with."""
    out = tmp_path_factory.mktemp("ranks") / "of"
    for ranks, layouts in ((2, ["4x1"]), (1, ["8x1", "4x2"])):
        name = f"{out}-{ranks}"
        done = run_script("tests/runs/rank_worker.py", dataset, prompts, name, *layouts, ranks=ranks)
        assert done.returncode == 0, done.stderr
    return out


def flat(records):
    return [x for record in records for x in record.values()]


@pytest.mark.parametrize("layout", ["8x1", "4x2"])
def test_two_ranks_equal_one(out, layout):
    first, second, one = (torch.load(f"{out}-{name}.pt") for name in ("2-4x1-0", "2-4x1-1", f"1-{layout}-0"))
    assert all(map(torch.equal, flat(first), flat(second)))
    for number, (found, expected) in enumerate(zip(flat(first), flat(one), strict=True)):
        scale = float(expected.abs().max()) if number % 2 == 0 else 1.0
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * scale, msg=lambda m, n=number: f"{n}: {m}")
    metrics = torch.stack([record["metrics"] for record in one])
    assert (metrics[:, -1] > 1e-4).all() and (metrics[:, -2] > 0).sum() > 25, "the steps left the ratio of 1"


@pytest.fixture(scope="module")
def alone(out):
    """What happened on one rank alone, as both ranks saw it."""
    return [torch.load(f"{out}-2-of-{rank}.pt") for rank in (0, 1)]


def test_groups_that_one_rank_lacks_are_replaced_or_dropped_by_both(alone):
    first, second = (flat(found["alone"]) for found in alone)
    assert all(map(torch.equal, first, second)) and all(x.abs().sum() > 0 for x in first)


def test_both_ranks_skip_a_step_that_one_cannot_take(alone):
    for found in alone:
        assert found["bad"]["gradient"] == (1, True) and found["bad"]["run"] == (1, 6, 3)
    first, second = (found["bad"]["weights"].values() for found in alone)
    assert all(map(torch.equal, first, second))
