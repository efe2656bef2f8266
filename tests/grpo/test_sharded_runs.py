"""Whole runs with parallel='fsdp', as a user starts them: two ranks do what one does, which can go on for them."""

import json

import pytest
import torch

from core.files.json_lines import read_records
from core.models import load_model
from tests.families import model_folder, write_sums
from tests.tiny import TEXT, judge, model, run_script, save, without_clock, write_text_dataset

pytestmark = pytest.mark.slow
SMALL = {"group_size": 3, "eval_problems": 4, "eval_completions": 2, "eval_interval": 2, "sample_interval": 4,
         "log_interval": 1, "learning_rate": 1e-3, "min_lr": 1e-3, "warmup_iters": 0, "optimizer": "adamw",
         "parallel": "fsdp", "device": "cpu"}


def run(settings, ranks=1):
    """The command on `ranks` ranks that share 4 problems. Returns what it printed."""
    settings = SMALL | {"batch_size": 4 // ranks} | settings
    done = run_script("grpo/train_grpo.py", *(f"--{key}={value}" for key, value in settings.items()), ranks=ranks,
                     )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_text_dataset(folder / "data", TEXT)
    for name, net in {"generator": model(scale=3.0, n_layer=2), "judge": judge(), "gold": judge(seed=6)}.items():
        save(folder / f"{name}.safetensors", net)
    return folder


def test_a_sharded_run_equals_one_rank_which_can_go_on_for_it(world):
    base = {"dataset": world / "data", "block_size": 32, "generator_checkpoint": world / "generator.safetensors",
            "judge_checkpoint": world / "judge.safetensors", "gold_judge_checkpoint": world / "gold.safetensors",
            "dtype": "float32"}
    run(base | {"out_dir": world / "alone", "max_iters": 4})
    shared = run(base | {"out_dir": world / "shared", "max_iters": 2, "lr_decay_iters": 4}, ranks=2)
    first, second = records(world / "alone"), records(world / "shared")
    assert_close(second, {step: first[step] for step in (0, 1, 2)})
    assert "eval/gold_judge" in second[2] and "x 2 ranks = 12 completions" in shared
    run(base | {"out_dir": world / "shared", "max_iters": 4, "resume": True})
    assert_close(records(world / "shared"), first)
    one, other = (load_model(str(world / name / "model.safetensors"))[0].weights() for name in ("alone", "shared"))
    for name, p in one.items():
        torch.testing.assert_close(other[name], p, rtol=1e-4, atol=1e-5)


def test_a_sharded_adapter_with_a_reward_model_equals_one_rank(world):
    base = {"dataset": write_sums(world / "sums.jsonl"), "generator_checkpoint": model_folder(world / "llama", "llama"),
            "reward_model_checkpoint": model_folder(world / "reward", "bert_reward"), "max_iters": 2,
            "reward_functions": "('reward_model','exact_match')", "lora_rank": 4, "max_new_tokens": 6,
            "success_reward": "exact_match", "pass_k": 2}
    for name, ranks in (("one", 1), ("two", 2)):
        run(base | {"out_dir": world / name}, ranks)
    first, second = records(world / "one"), records(world / "two")
    assert_close(second, first)
    assert first[2]["reward/reward_model"] != first[1]["reward/reward_model"] and first[2]["mean_kl"] > 0
    with open(world / "two" / "model" / "nano_grpo.json") as f:
        assert json.load(f)["step"] == 2
