"""The command, as a user runs it."""

import os

import pytest

from core.models import save_model
from grpo.grpo_config import GRPOConfig
from tests.families import model_folder
from tests.tiny import (
    CAUSAL, causal_model, causal_policy, judge, model, read_records, run_here, same, save, write_prompt_dataset)
from tests.trainers import prompt_trainer, records, run

TRAIN = "grpo/train_grpo.py"
SMALL = {"batch_size": 4, "group_size": 3, "max_iters": 3, "eval_problems": 4, "eval_completions": 2,
         "log_interval": 1, "sample_interval": 3, "device": "cpu"}


@pytest.fixture(scope="module")
def causal_world(tmp_path_factory):
    """The arguments of a run that works, of a causal generator on a dataset of prompts."""
    folder = tmp_path_factory.mktemp("causal")
    write_prompt_dataset(folder / "sums")
    save_model(str(folder / "g.safetensors"), causal_model(scale=3.0), CAUSAL)
    return SMALL | {"dataset": folder / "sums", "generator_checkpoint": folder / "g.safetensors",
                    "task_type": "general", "max_new_tokens": 5, "out_dir": folder / "out"}


def arguments(settings):
    return [f"--{key}={value}" for key, value in settings.items()]


def train(base, **changes):
    """The command, in this process."""
    return run_here(TRAIN, *arguments(base | changes))


@pytest.mark.slow
def test_a_masked_fill_model_learns_to_answer_prompts_and_is_then_trained_on_rewards(causal_world, tmp_path):
    """The two commands: supervised on the records' completions, then GRPO in blocks."""
    done = run_here("core/pretrain.py", *arguments({
        "dataset": causal_world["dataset"], "mode": "masked_fill", "block_size": 24, "n_layer": 1, "n_embd": 16,
        "n_head": 2, "max_iters": 12, "eval_interval": 6, "batch_size": 16, "device": "cpu", "warmup_iters": 0,
        "out_dir": tmp_path / "start"}))
    assert done.returncode == 0, done.stderr
    losses = [r["val_loss"] for r in read_records(tmp_path / "start" / "metrics.jsonl") if "val_loss" in r]
    assert losses[-1] < losses[0]
    settings = {"generator_checkpoint": f"{tmp_path}/start/model.safetensors", "reward_functions": "exact_match",
                "unmask_steps": 2, "block_length": 3, "temperature": 1.0, "top_p": 1.0, "out_dir": tmp_path / "out"}
    done = train(causal_world, **settings)
    assert done.returncode == 0, done.stderr
    steps = [r for r in read_records(tmp_path / "out" / "metrics.jsonl") if "loss" in r]
    assert steps[0]["mean_kl"] == 0.0 and steps[0]["mismatch_max"] < 1e-4 and steps[0]["ratio_minus_one"] < 1e-4
    assert all(0 < r["completion_length"] <= 6 and 0 <= r["truncated"] <= 1 for r in steps)
    resumed = train(causal_world, **settings | {"max_iters": 4, "resume": True})
    assert resumed.returncode == 0, resumed.stderr


@pytest.mark.slow
def test_a_run_of_no_steps_evaluates_and_ends(causal_world, tmp_path):
    done = train(causal_world, reward_functions="exact_match", max_iters=0, out_dir=tmp_path)
    assert done.returncode == 0, done.stderr
    only, = read_records(tmp_path / "metrics.jsonl")
    assert only["step"] == 0 and 0 <= only["eval/sampled_accuracy"] <= 1 and "the model" not in done.stdout
    assert not {"model.safetensors", "state.pt"} & set(os.listdir(tmp_path))


def test_a_dry_run_prints_the_changed_settings_and_the_plan_and_writes_nothing(dataset, tmp_path):
    changed = SMALL | {
        "dataset": dataset, "generator_checkpoint": save(tmp_path / "generator.safetensors", model()),
        "judge_checkpoint": save(tmp_path / "judge.safetensors", judge()), "dtype": "float32", "block_size": 32,
        "gold_judge_checkpoint": save(tmp_path / "gold.safetensors", judge(seed=6)), "out_dir": tmp_path / "dry",
        "dry_run": True}
    done = train(changed)
    out = done.stdout
    assert done.returncode == 0 and done.stderr == "" and not (tmp_path / "dry").exists()
    settings, _, plan = out.replace("\n    ", " ").partition("effective batch: 4 problems x 3 completions ")
    keys = [line.split(" = ")[0] for line in settings.strip().split("\n")]
    assert set(keys) == {key for key, value in changed.items() if str(getattr(GRPOConfig(), key)) != str(value)}
    assert plan.count("frozen") == 3


# A teacher

def test_the_teacher_stays_and_the_student_comes_nearer(prompts, tmp_path):
    save_model(str(tmp_path / "teacher"), causal_model(seed=9, n_layer=2), CAUSAL)
    t = prompt_trainer(prompts, tmp_path / "out", teacher_checkpoint=str(tmp_path / "teacher"), kl_beta=0.0,
                       task_type="fill_in", group_size=1, batch_size=8, max_iters=30, learning_rate=1e-2, min_lr=1e-2,
                       eval_interval=30)
    run(t)
    assert same(t.reference, causal_policy(seed=9, n_layer=2))
    kl = [record["eval/kl"] for record in records(tmp_path / "out") if "eval/kl" in record]
    assert 0.1 < kl[0] and 0 < kl[-1] < 0.5 * kl[0]


def test_a_run_without_rewards_has_a_plan_a_doctor_and_a_report(causal_world, tmp_path):
    save_model(str(tmp_path / "teacher"), causal_model(seed=9, n_layer=2), CAUSAL)
    taught = causal_world | {"teacher_checkpoint": tmp_path / "teacher", "kl_beta": 0.0, "task_type": "fill_in",
                             "out_dir": tmp_path / "out", "group_size": 1}
    for more in ({"dry_run": True}, {"doctor": True}, {"max_iters": 2}):
        done = train(taught, **more)
        assert done.stderr == "" and (done.returncode == 0 or "doctor" in more), done.stderr
    assert {"report.html", "curves.png"} <= set(os.listdir(tmp_path / "out"))


# Shipped configs on small models

PUBLISHED = {  # the form of a row of the data set of the hub that the config names
    "gsm8k": {"question": "Ann has {} cats and gets {} more. How many has she?",
              "answer": "She has {0}+{1}=<<{0}+{1}={2}>>{2} cats.\n#### {2}"},
    "math": {"problem": "What is ${}+{}$?", "solution": r"It is $\boxed{{{2}}}$.", "answer": "{2}",
             "subject": "Prealgebra", "unique_id": "test/{}-{}"}}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_of_a_published_run_works_on_a_small_model_and_rows_of_that_form(tmp_path, name):
    datasets, _ = pytest.importorskip("datasets"), pytest.importorskip("math_verify")
    for split, first in (("train", 1), ("test", 50)):
        rows = [{key: text.format(first + i, 3, first + i + 3) for key, text in PUBLISHED[name].items()}
                for i in range(8)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data" / f"{split}.parquet")
    done = run_here(TRAIN, f"config/grpo_{name}.py", *arguments(SMALL | {
        "dataset": f"hf:{tmp_path}/data",
        "generator_checkpoint": model_folder(tmp_path / "model", "qwen3", longest=999),
        "max_iters": 1, "max_new_tokens": 4, "out_dir": tmp_path / "out"}))
    assert done.returncode == 0, done.stderr
    assert "8 training and 8 validation prompts" in " ".join(done.stdout.split())
    assert "boxed{}" in done.stdout or "boxed{ANSWER}" in done.stdout
    assert "nswer:" in done.stdout or name == "gsm8k", "the text around the prompt is its end"
    evaluation = read_records(tmp_path / "out" / "metrics.jsonl")[0]
    assert evaluation["eval/greedy_accuracy"] == 0
