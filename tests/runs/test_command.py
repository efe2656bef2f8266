"""The command, as a user runs it."""

import json
import pathlib

import pytest

from core.models import save_model
from grpo.grpo_config import GRPOConfig
from tests.tiny import CAUSAL, causal_model, causal_policy, judge, model, run_here, run_script, same, save
from tests.trainers import prompt_trainer, records, run


def test_a_dry_run_prints_the_changed_settings_and_the_plan_and_writes_nothing(dataset, tmp_path):
    changed = {
        "batch_size": 4, "group_size": 3, "max_iters": 3, "eval_problems": 4, "device": "cpu",
        "dataset": dataset, "generator_checkpoint": save(tmp_path / "generator.safetensors", model()),
        "judge_checkpoint": save(tmp_path / "judge.safetensors", judge()), "dtype": "float32", "block_size": 32,
        "gold_judge_checkpoint": save(tmp_path / "gold.safetensors", judge(seed=6)), "out_dir": tmp_path / "dry",
        "dry_run": True}
    done = run_here("grpo/train_grpo.py", *(f"--{key}={value}" for key, value in changed.items()))
    out = done.stdout
    assert done.returncode == 0 and done.stderr == "" and not (tmp_path / "dry").exists()
    settings, _, plan = out.replace("\n    ", " ").partition("effective batch: 4 problems x 3 completions ")
    keys = [line.split(" = ")[0] for line in settings.strip().split("\n")]
    assert set(keys) == {key for key, value in changed.items() if str(getattr(GRPOConfig(), key)) != str(value)}
    assert plan.count("frozen") == 3


TRAIN, EXAMPLE = "grpo/train_grpo.py", "config/grpo_example.py"
ISSUED = ["--group_size=16", "--kl_beta=0.2", "--learning_rate=5e-6"]


def plan_lines(*arguments):
    """The lines of a dry run, which must end well."""
    done = run_here(TRAIN, *arguments, "--dry_run=True")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("arguments", [[], ISSUED, ["--resume=False"], ["--resume=True", "--resume=False"]], ids=str)
def test_a_command_without_a_config_takes_the_example_and_says_so(arguments):
    first, *lines = plan_lines(*arguments)
    assert EXAMPLE in first and lines == plan_lines(EXAMPLE, *arguments)
    if arguments == ISSUED:
        found = {line.split(" = ")[0]: line.split() for line in lines}
        assert [found[key][2] for key in ("group_size", "kl_beta", "learning_rate")] == ["16", "0.2", "5e-06"]
        assert found["min_lr"][2] == "5e-07" and {"learning_rate,", "2e-05", f"{EXAMPLE})"} <= set(found["min_lr"])


@pytest.fixture
def small_example(dataset, tmp_path, monkeypatch):
    """A small example in the place of the shipped one. Returns its path."""
    monkeypatch.chdir(tmp_path)
    settings = {
        "dataset": dataset, "generator_checkpoint": save(tmp_path / "generator.safetensors", model()),
        "judge_checkpoint": save(tmp_path / "judge.safetensors", judge()), "block_size": 32, "batch_size": 4,
        "group_size": 3, "max_iters": 1, "eval_problems": 4, "device": "cpu", "min_lr": 1e-6}
    path = tmp_path / "example.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()))
    monkeypatch.setattr("grpo.plan.EXAMPLE", str(path))
    return "example.py"


def test_the_line_about_the_example_is_in_every_start_that_takes_it_and_in_no_other(small_example, without_pictures):
    out = pathlib.Path("out-grpo")
    checked = run_here(TRAIN, "--doctor=True").stdout
    assert small_example in checked.splitlines()[0] and not out.exists()
    done = run_here(TRAIN, "--learning_rate=1e-6", "--seed=2")
    first, *lines = done.stdout.splitlines()
    assert done.returncode == 0 and small_example in first and first not in lines
    config = json.loads((out / "config.json").read_text())
    origin = {key: about["set in"] for key, about in config["starts"][0]["settings"].items()}
    assert (origin["batch_size"], origin["seed"]) == (small_example, "command line")
    for arguments in (["--resume=True"], ["--resume"], ["--resume=auto"], ["--resume=auto", "--max_iters=2"]):
        resumed = run_here(TRAIN, *arguments)
        assert resumed.returncode == 0 and small_example not in resumed.stdout.splitlines()[0], resumed.stderr
    assert [r["end"]["step"] for r in json.loads((out / "config.json").read_text())["starts"]] == [1, 1, 1, 1, 2]
    assert json.loads((out / "config.json").read_text())["seed"] == 2
    for named in ([small_example], ["--dataset=gone"], ["--generator_checkpoint=gone"], ["n=1"]):
        refused = run_here(TRAIN, *named, "--dry_run=True")
        assert (refused.returncode == 0) == (named == [small_example]) and first not in refused.stdout


@pytest.mark.slow
def test_of_several_ranks_one_tells_that_the_example_is_taken():
    done = run_script(TRAIN, *ISSUED, "--dry_run=True", ranks=2)
    assert done.returncode == 0 and done.stdout.splitlines().count(plan_lines(*ISSUED)[0]) == 1, done.stdout


def test_the_teacher_stays_and_the_student_comes_nearer(prompts, tmp_path):
    save_model(str(tmp_path / "teacher"), causal_model(seed=9, n_layer=2), CAUSAL)
    t = prompt_trainer(prompts, tmp_path / "out", teacher_checkpoint=str(tmp_path / "teacher"), kl_beta=0.0,
                       task_type="fill_in", group_size=1, batch_size=8, max_iters=30, learning_rate=1e-2, min_lr=1e-2,
                       eval_interval=30)
    run(t)
    assert same(t.reference, causal_policy(seed=9, n_layer=2))
    kl = [record["eval/kl"] for record in records(tmp_path / "out") if "eval/kl" in record]
    assert 0.1 < kl[0] and 0 < kl[-1] < 0.5 * kl[0]
