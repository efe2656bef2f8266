"""Whole runs with parallel='fsdp', as a user starts them: two ranks do what one does, which can go on for them."""

import pytest
import torch

from core.models import load_model
from tests.tiny import TEXT, judge, model, read_records, run_here, run_script, save, without_clock, write_text_dataset

pytestmark = pytest.mark.slow
KILLED = """
import os, signal, torch
from grpo.rewards import reward

@reward(0, 1)
def mine(completions, **columns):
    if os.environ["RANK"] == "2":
        torch.Tensor.backward = lambda *arguments, **settings: os.kill(os.getpid(), signal.SIGKILL)
    return [min(1.0, len(text) / 8) for text in completions]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with data and models, and the settings of a run on them."""
    folder = tmp_path_factory.mktemp("world")
    write_text_dataset(folder / "data", TEXT)
    return folder, {
        "dataset": folder / "data", "block_size": 32, "dtype": "float32", "group_size": 3, "eval_problems": 4,
        "generator_checkpoint": save(folder / "generator.safetensors", model(scale=3.0, n_layer=2)),
        "judge_checkpoint": save(folder / "judge.safetensors", judge()),
        "gold_judge_checkpoint": save(folder / "gold.safetensors", judge(seed=6)),
        "eval_completions": 2, "eval_interval": 2, "sample_interval": 4, "log_interval": 1, "learning_rate": 1e-3,
        "min_lr": 1e-3, "warmup_iters": 0, "optimizer": "adamw", "parallel": "fsdp", "device": "cpu"}


def run(settings, start=run_here, **more):
    """The finished command."""
    return start("grpo/train_grpo.py", *(f"--{key}={value}" for key, value in settings.items()), **more)


def records(folder):
    """{step: metrics that do not depend on the clock}, held-out ones among them."""
    found = {}
    for record in without_clock(read_records(str(folder / "metrics.jsonl"))):
        found.setdefault(record["step"], {}).update(record)
    return found


def assert_close(run, other):
    """Metrics that are nothing but rounding need only be small."""
    assert run.keys() == other.keys()
    for step, metrics in run.items():
        rounding = {name for name in metrics if name.startswith(("mismatch_", "ratio_minus_one"))}
        assert metrics.keys() == other[step].keys()
        assert all(abs(found[step][name]) < 1e-4 for found in (run, other) for name in rounding), step
        rest = metrics.keys() - rounding
        assert {name: metrics[name] for name in rest} == pytest.approx({name: other[step][name] for name in rest},
                                                                       rel=1e-4, abs=1e-6), step


def test_a_sharded_run_equals_one_rank_which_can_go_on_for_it(world):
    folder, base = world
    alone, shared = base | {"out_dir": folder / "alone", "batch_size": 4}, base | {"out_dir": folder / "shared"}
    done = [run(alone | {"max_iters": 4}),
            run(shared | {"max_iters": 2, "lr_decay_iters": 4, "batch_size": 2}, run_script, ranks=2)]
    first, second = records(folder / "alone"), records(folder / "shared")
    assert_close(second, {step: first[step] for step in (0, 1, 2)})
    assert "eval/gold_judge" in second[2] and "x 2 ranks = 12 completions" in done[1].stdout
    done.append(run(shared | {"max_iters": 4, "batch_size": 4, "resume": True}))
    assert [x.returncode for x in done] == [0, 0, 0], done
    assert_close(records(folder / "shared"), first)
    one, other = (load_model(str(folder / name / "model.safetensors"))[0].weights() for name in ("alone", "shared"))
    for name, p in one.items():
        torch.testing.assert_close(other[name], p, rtol=1e-4, atol=1e-5)


def test_if_a_rank_is_killed_in_a_step_of_a_sharded_run_the_others_end_with_a_line_each(world):
    folder, base = world
    (folder / "killed.py").write_text(KILLED)
    done = run(base | {"out_dir": folder / "killed", "reward_file": folder / "killed.py", "batch_size": 1,
                       "reward_functions": "('mine',)"}, run_script, ranks=3)
    errors = sorted(line for line in done.stderr.split("\n") if line.startswith("error: "))
    assert done.returncode and len(errors) == 2 and "grpo_trainer.py" not in done.stderr, done.stderr
    for rank, line in enumerate(errors):
        assert line.startswith(f"error: rank {rank} ended because another rank did, see its error"), line
