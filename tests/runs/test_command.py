"""The command, as a user runs it."""

from core.models import save_model
from grpo.grpo_config import GRPOConfig
from tests.tiny import CAUSAL, causal_model, causal_policy, judge, model, run_here, same, save
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


def test_the_teacher_stays_and_the_student_comes_nearer(prompts, tmp_path):
    save_model(str(tmp_path / "teacher"), causal_model(seed=9, n_layer=2), CAUSAL)
    t = prompt_trainer(prompts, tmp_path / "out", teacher_checkpoint=str(tmp_path / "teacher"), kl_beta=0.0,
                       task_type="fill_in", group_size=1, batch_size=8, max_iters=30, learning_rate=1e-2, min_lr=1e-2,
                       eval_interval=30)
    run(t)
    assert same(t.reference, causal_policy(seed=9, n_layer=2))
    kl = [record["eval/kl"] for record in records(tmp_path / "out") if "eval/kl" in record]
    assert 0.1 < kl[0] and 0 < kl[-1] < 0.5 * kl[0]
