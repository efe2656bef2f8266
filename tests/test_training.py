"""Whole runs: supervised and GRPO, interrupted and not."""

import json
import os

import pytest
import torch

from core.checkpoint_manager import CheckpointManager, load_model
from core.logger import Logger, read_records
from core.trainer import BadSteps
from grpo.grpo_trainer import GRPOTrainer
from grpo.reference import build_reference
from grpo.problems import fill_in_evaluation
from tests.tiny import (TOKENIZER, config, consumer, judge, model, one_process, rewards, run_script, save,
                        undocumented)


def train(dataset, out_dir, resume=False, **settings):
    c = config(dataset=dataset, out_dir=str(out_dir), eval_problems=4, eval_completions=2, grad_clip=1.0,
               learning_rate=1e-3, lr_decay_iters=6, log_interval=1, eval_interval=3, sample_interval=3,
               save_interval=3, **settings)
    dist, policy = one_process(), model(seed=1, scale=3.0)
    reference, scorer = build_reference(policy, c, TOKENIZER, dist.device), judge()
    evaluation = fill_in_evaluation(c, reference, scorer, None, dist, torch.float32)
    trainer = GRPOTrainer(policy, reference, rewards(c, scorer), consumer(dataset, c), evaluation, c,
                          Logger(c.out_dir, c.max_iters, evaluation.columns), dist, torch.float32)
    if resume:
        trainer.resume()
    trainer.run()
    return trainer


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def without_clock(records):
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "tokens_per_second"} for r in records]


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(dataset, tmp_path):
    whole = train(dataset, tmp_path / "whole", max_iters=6)
    train(dataset, tmp_path / "cut", max_iters=3)
    resumed = train(dataset, tmp_path / "cut", max_iters=6, resume=True)
    assert whole.step == resumed.step == 6
    assert same(whole.policy, resumed.policy)
    for a, b in zip(whole.optimizers, resumed.optimizers, strict=True):
        for x, y in zip(a.state_dict()["state"].values(), b.state_dict()["state"].values(), strict=True):
            assert all(torch.equal(x[k], y[k]) for k in x)
    assert whole.before == resumed.before
    records = [without_clock(read_records(tmp_path / name / "metrics.jsonl")) for name in ("whole", "cut")]
    assert records[0] == records[1]


def test_max_iters_is_the_number_of_optimizer_steps_and_everything_is_written(dataset, tmp_path, capsys):
    trainer = train(dataset, tmp_path, max_iters=5)
    counts = {int(s["step"]) for o in trainer.optimizers for s in o.state_dict()["state"].values()}
    assert counts == {5}
    assert sorted(os.listdir(tmp_path)) == ["curves.png", "metrics.jsonl", "model.safetensors", "samples.jsonl",
                                            "state.pt"]
    final, facts = load_model(str(tmp_path / "model.safetensors"))
    assert same(final, trainer.policy) and facts["step"] == 5 and "eval/judge" in facts
    training = [r for r in read_records(tmp_path / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in training] == [1, 2, 3, 4, 5]
    canonical = {"loss", "pg_loss", "kl_penalty", "mean_reward", "std_reward", "mean_advantage", "mean_kl",
                 "mean_log_prob", "entropy", "clip_fraction", "grad_norm", "lr", "frac_reward_zero_std",
                 "unique_completions", "mean_token_accuracy", "reward/judge", "tokens_per_second", "time/collect",
                 "time/reward", "time/train", "skipped_steps"}
    assert canonical <= set(training[0])
    assert not undocumented({key for record in read_records(tmp_path / "metrics.jsonl") for key in record} - {"step"})
    assert json.loads(open(tmp_path / "samples.jsonl").readline())["best_score"] > 0
    shown = capsys.readouterr().out
    assert "held-out" in shown and "before" in shown and "change" in shown and "best" in shown


def test_another_seed_is_another_run(dataset, tmp_path):
    a, b = (train(dataset, tmp_path / str(seed), max_iters=2, seed=seed) for seed in (1, 2))
    assert not same(a.policy, b.policy) and a.before == b.before, "the held-out problems are the same for every seed"


def test_a_run_that_no_longer_trains_stops_and_names_the_last_good_checkpoint(tmp_path):
    bad = BadSteps(3, CheckpointManager(str(tmp_path)))
    for skipped in (1, 1, 0, 1, 1):
        bad.check(skipped)
    with pytest.raises(ValueError, match="3 steps in a row.*start again"):
        bad.check(1)
    (tmp_path / "state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=f"resume=True from {tmp_path}/state.pt"):
        bad.check(1)


def pretrain(dataset, out_dir, *arguments):
    done = run_script("core/pretrain.py", f"--dataset={dataset}", f"--out_dir={out_dir}", "--block_size=32",
                      "--n_layer=1", "--n_embd=16", "--n_head=2", "--batch_size=8", "--lr_decay_iters=20",
                      "--log_interval=5", "--eval_interval=10", "--save_interval=10", "--eval_batches=2",
                      "--device=cpu", *arguments)
    assert done.returncode == 0, done.stderr
    return read_records(os.path.join(out_dir, "metrics.jsonl"))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_pretraining_learns_and_resumes_bit_for_bit(dataset, tmp_path, optimizer):
    settings = (f"--optimizer={optimizer}", "--learning_rate=1e-2")
    whole = pretrain(dataset, tmp_path / "whole", "--max_iters=20", *settings)
    pretrain(dataset, tmp_path / "cut", "--max_iters=10", *settings)
    resumed = pretrain(dataset, tmp_path / "cut", "--max_iters=20", "--resume=True", *settings)
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
