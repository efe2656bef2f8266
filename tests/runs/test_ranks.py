"""Two ranks are one rank with twice the batch, or with twice the accumulation, and evaluate what one does. A number
that is not finite on one of them makes both skip the step."""

import re

import pytest
import torch

from core.models import save_model
from tests.tiny import CAUSAL, causal_model, run_script

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


@pytest.mark.parametrize("kind", ["fill", "prompts"])
@pytest.mark.parametrize("cut", ["3 batches", "1 batch"])
def test_two_ranks_evaluate_what_one_does_and_call_a_reward_once_for_each_completion(out, kind, cut):
    """To the last bit if there are enough batches, else up to the rounding of smaller ones."""
    first, second, one = (torch.load(f"{out}-{name}.pt")[f"{kind}, {cut}"]
                          for name in ("2-held-out-0", "2-held-out-1", "1-held-out-0"))
    assert first["called"] and second["called"] and second["metrics"] == first["metrics"]
    assert sorted(first["called"] + second["called"]) == sorted(one["called"])
    assert first["samples"] == one["samples"] and len(one["samples"]) == 3
    assert list(first["metrics"]) == list(one["metrics"]) and len(one["metrics"]) > 9
    assert first["metrics"] == (one["metrics"] if cut == "3 batches" else pytest.approx(one["metrics"], rel=1e-5))


def test_two_ranks_evaluate_supervised_models_to_the_last_bit_as_one_does(out):
    first, second, one = (torch.load(f"{out}-{name}.pt")["supervised"]
                          for name in ("2-held-out-0", "2-held-out-1", "1-held-out-0"))
    assert first == one == second and len(one[0]) == 2 and len(one[1]) == 5


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


MINE = """
import os
from grpo.rewards import reward

@reward(0, 99)
def nowhere(completions):
    return [0.5] * len(completions)

@reward(0, 99)
def on_one_rank(completions):
    return [float(i) * (os.environ["RANK"] == "1") for i, _ in enumerate(completions)]
"""


def test_a_reward_varies_if_it_does_on_any_rank_and_held_out_rewards_are_those_of_all(prompts, tmp_path):
    save_model(str(tmp_path / "g.safetensors"), causal_model(scale=3.0), CAUSAL)
    (tmp_path / "mine.py").write_text(MINE)
    settings = {"dataset": prompts, "generator_checkpoint": tmp_path / "g.safetensors", "task_type": "general",
                "max_new_tokens": 5, "batch_size": 2, "group_size": 2, "max_iters": 4, "eval_problems": 4,
                "device": "cpu", "kl_beta": 0.0, "out_dir": tmp_path / "out", "reward_file": tmp_path / "mine.py",
                "reward_functions": "('nowhere','on_one_rank')"}
    done = run_script("grpo/train_grpo.py", *(f"--{key}={value}" for key, value in settings.items()), ranks=2)
    assert done.returncode == 0, done.stderr
    line, = re.findall("(?m)^steps 1 to 3: .*", done.stdout)
    assert "nowhere (mean: 0.5)" in line and "on_one_rank" not in line
    held_out, = set(re.findall(r"mean_reward (\d\S*)", done.stdout))
    assert float(held_out) == 0.5 + sum(range(8)) / 16, "before and after: rank 1 has the second half"
