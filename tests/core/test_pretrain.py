"""Supervised training as a user starts it."""

import os

import pytest

from core.checkpoint_manager import load_model
from core.logger import read_records
from core.pretrain import main
from tests.tiny import model, run_script, same, save, without_clock

pytestmark = pytest.mark.slow


def command(dataset, out_dir, *arguments):
    return [f"--dataset={dataset}", f"--out_dir={out_dir}", "--block_size=32", "--n_layer=1", "--n_embd=16",
            "--n_head=2", "--batch_size=8", "--lr_decay_iters=20", "--log_interval=5", "--eval_interval=10",
            "--save_interval=10", "--eval_batches=2", "--device=cpu", *arguments]


def start(dataset, out_dir, *arguments):
    return run_script("core/pretrain.py", *command(dataset, out_dir, *arguments))


def pretrain(dataset, out_dir, *arguments, script=False):
    """The metrics of a run, in this process or, slower, as a script."""
    if script:
        done = start(dataset, out_dir, *arguments)
        assert done.returncode == 0, done.stderr
    else:
        main(command(dataset, out_dir, *arguments))
    return read_records(os.path.join(out_dir, "metrics.jsonl"))


@pytest.mark.parametrize("optimizer, script", [("muon", True), ("adamw", False)])
def test_pretraining_learns_and_resumes_bit_for_bit(dataset, tmp_path, optimizer, script):
    run = lambda name, *more: pretrain(dataset, tmp_path / name, f"--optimizer={optimizer}", "--learning_rate=1e-2",
                                       *more, script=script)
    whole = run("whole", "--max_iters=20")
    run("cut", "--max_iters=10")
    resumed = run("cut", "--max_iters=20", "--resume=True")
    assert without_clock(whole) == without_clock(resumed)
    losses = [r["loss"] for r in whole if "loss" in r]
    assert losses[-1] < losses[0] - 0.3
    a, b = (load_model(str(tmp_path / name / "model.safetensors"))[0] for name in ("whole", "cut"))
    assert same(a, b)


@pytest.mark.parametrize("mode", ["realness", "cls", "language_model"])
def test_the_other_modes_train(dataset, tmp_path, mode):
    generator = save(tmp_path / "g.safetensors", model(n_layer=1, block_size=32))
    judging = ("--mode=sequence_scorer", f"--judge_head={mode}", f"--fill_checkpoints=['{generator}']",
               f"--init_from={generator}")
    records = pretrain(dataset, tmp_path / "out", "--max_iters=10",
                       *(("--mode=language_model",) if mode == "language_model" else judging))
    assert records[-1].keys() >= ({"val_loss"} if mode == "language_model" else {"auc/0", "pearson/0", "spearman/0"})
    net, _ = load_model(str(tmp_path / "out" / "model.safetensors"))
    assert net.config.mode == ("language_model" if mode == "language_model" else "sequence_scorer")


def test_an_earlier_run_is_set_aside_even_if_the_new_one_starts_from_its_model(dataset, tmp_path):
    pretrain(dataset, tmp_path / "out", "--max_iters=2")
    done = start(dataset, tmp_path / "out", "--max_iters=1", f"--init_from={tmp_path}/out/model.safetensors")
    assert done.returncode == 0 and "held an earlier run, which is now in" in done.stdout, done.stderr
    assert load_model(str(tmp_path / "out" / "previous" / "1" / "model.safetensors"))[1]["step"] == 2
    assert load_model(str(tmp_path / "out" / "model.safetensors"))[1]["step"] == 1
    assert "masked_fill: " in done.stdout and "8 windows x 1 accumulation x 1 ranks = 8 per step" in done.stdout


@pytest.mark.parametrize("setting, message", [
    ("--mode=sequence_scorer", "fill_checkpoints is empty"), ("--dataset=nowhere", "dataset not prepared"),
    ("--resume=True", "resume=True, but"), ("--n_layers=2", "did you mean n_layer")])
def test_a_mistake_is_one_clear_line(dataset, tmp_path, setting, message):
    done = start(dataset, tmp_path / "out", setting)
    errors = done.stderr.strip().split("\n")
    assert done.returncode in (1, 2) and len(errors) == 1 and message in errors[0], done.stderr
