"""The supervised loop: what it counts, writes and resumes."""

import os
import re

import pytest
import torch

from core.build import build_batches, build_data, build_model
from core.checkpoint_manager import CheckpointManager
from core.logger import Logger, read_records
from core.models import load_model
from core.pretrain_config import PretrainConfig
from core.trainer import COLUMNS, BadSteps, Trainer
from tests.tiny import one_process, same, same_momentum, undocumented, without_clock


def train(dataset, out_dir, resume=False, **settings):
    c = PretrainConfig(**{"dataset": dataset, "out_dir": str(out_dir), "block_size": 32, "n_layer": 1, "n_embd": 16,
                          "n_head": 2, "batch_size": 4, "learning_rate": 1e-2, "lr_decay_iters": 6, "warmup_iters": 2,
                          "log_interval": 1, "eval_interval": 3, "save_interval": 3, "eval_batches": 2,
                          "dropout": 0.1, "device": "cpu", "max_iters": 6} | settings)
    dist = one_process()
    data = build_data(c, dist)
    batches, evaluate = build_batches(c, data, dist)
    trainer = Trainer(build_model(c, data, dist), c, batches, evaluate, data.tokenizer,
                      Logger(c.out_dir, c.max_iters, COLUMNS), dist)
    if resume:
        trainer.resume()
    trainer.run()
    return trainer


def test_a_run_that_no_longer_trains_stops_and_names_the_last_good_checkpoint(tmp_path):
    bad = BadSteps(3, CheckpointManager(str(tmp_path), lambda path, **facts: None))
    for skipped in (1, 1, 0, 1, 1):
        bad.check(skipped)
    with pytest.raises(ValueError, match="3 steps in a row.*start again"):
        bad.check(1)
    (tmp_path / "state.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=f"resume=True from {re.escape(str(tmp_path))}/state.pt"):
        bad.check(1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(dataset, tmp_path, optimizer):
    whole = train(dataset, tmp_path / "whole", optimizer=optimizer)
    train(dataset, tmp_path / "cut", optimizer=optimizer, max_iters=3)
    resumed = train(dataset, tmp_path / "cut", optimizer=optimizer, resume=True)
    assert whole.step == resumed.step == 6 and same(whole.model, resumed.model)
    assert same_momentum(whole.optimizers, resumed.optimizers)
    records = [without_clock(read_records(tmp_path / name / "metrics.jsonl")) for name in ("whole", "cut")]
    assert records[0] == records[1] and len(records[0]) == 8, "six steps and two evaluations"
    assert not undocumented({key for record in records[0] for key in record} - {"step"})


def test_max_iters_is_the_number_of_optimizer_steps_and_everything_is_written(dataset, tmp_path):
    trainer = train(dataset, tmp_path / "run", max_iters=5, export=str(tmp_path / "shipped.safetensors"),
                    gradient_accumulation_steps=2)
    counts = {int(s["step"]) for o in trainer.optimizers for s in o.state_dict()["state"].values() if "step" in s}
    assert counts == {5}
    assert sorted(os.listdir(tmp_path / "run")) == ["metrics.jsonl", "model.safetensors", "state.pt"]
    final, facts = load_model(str(tmp_path / "run" / "model.safetensors"))
    assert same(final, trainer.model) and facts["step"] == 5 and "val_loss" in facts
    shipped, facts = load_model(str(tmp_path / "shipped.safetensors"))
    assert facts["step"] == 5 and not same(shipped, trainer.model)
    for a, b in zip(shipped.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b.half().float()), "in float16"
    assert [r["step"] for r in read_records(tmp_path / "run" / "metrics.jsonl") if "loss" in r] == [1, 2, 3, 4, 5]


def test_evaluation_is_without_dropout_and_gradients_and_training_with_them(dataset, tmp_path):
    seen = []

    def evaluate(model):
        seen.append((model.training, torch.is_grad_enabled()))
        return {"val_loss": 1.0}

    trainer = train(dataset, tmp_path, max_iters=1)
    trainer.evaluate = evaluate
    trainer.model.train()
    assert trainer.evaluation() == {"val_loss": 1.0} and seen == [(False, False)]


def test_a_step_that_is_not_finite_is_counted_and_too_many_end_the_run(dataset, tmp_path):
    c = {"max_iters": 6, "max_bad_steps": 3, "log_interval": 1}
    good = train(dataset, tmp_path / "good", **c)
    assert good.skipped_steps == 0
    with torch.no_grad():
        next(good.model.parameters()).fill_(torch.nan)
    good.step = 0
    with pytest.raises(ValueError, match="3 steps in a row had a loss or gradient that is not finite"):
        good.run()
    assert good.step == 3
