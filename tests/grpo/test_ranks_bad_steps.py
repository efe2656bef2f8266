"""What is not finite on one of two ranks makes both skip the step."""

import os

import pytest
import torch

from tests.tiny import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(dataset, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "bad"
    done = run_script("tests/grpo/bad_step_worker.py", dataset, prompts, out, ranks=2)
    assert done.returncode == 0, done.stderr
    return out, done.stdout, [torch.load(f"{out}-{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_both_ranks_skip_a_step_that_one_cannot_take(ranks):
    *_, (one, other) = ranks
    names = [name for name in one if name not in ("nothing", "run")]
    assert len(names) == 17 and one.keys() == other.keys()
    for name in names:
        for found in (one, other):
            assert found[name]["skipped_steps"] == 1 and not found[name]["moved"], name
    for found in (one, other):
        assert found["nothing"]["skipped_steps"] == 0 and found["nothing"]["moved"], "two ranks do train"


def test_a_run_goes_on_after_it_and_the_ranks_stay_equal(ranks):
    out, shown, (one, other) = ranks
    assert torch.equal(one["run"]["weights"], other["run"]["weights"])
    for found in (one, other):
        assert (found["run"]["skipped_steps"], found["run"]["step"], found["run"]["iteration"]) == (1, 6, 3)
    folder = f"{out}-run/bad_steps"
    assert sorted(os.listdir(folder)) == ["step-000003-rank-0.pt", "step-000003-rank-1.pt"]
    rewards = [torch.load(os.path.join(folder, name), weights_only=True)["sampled"][0]["reward"]
               for name in sorted(os.listdir(folder))]
    assert [int(reward.isinf().sum()) for reward in rewards] == [0, 1], "the files tell which rank it was"
    assert shown.count("step 3 is skipped") == 1
