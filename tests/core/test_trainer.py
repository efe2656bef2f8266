"""Supervised training: the gradient of a step, and what a run counts, writes and resumes."""

import itertools
import os
import time

import pytest
import torch

from core.files.json_lines import read_records
from core.logger import Logger
from core.models import load_model
from core.supervised.build import build_batches, build_data, build_model
from core.supervised.config import PretrainConfig
from core.trainer import COLUMNS, Trainer, training_step
from tests.tiny import (
    Catcher,
    flat_gradient,
    model,
    one_process,
    same,
    same_momentum,
    undocumented,
    without_clock,
)


def micro_batches(rows=3):
    """Two micro-batches (input, target, mask)."""
    masks = [torch.rand(rows, 12) < 0.5 for _ in range(2)]
    for mask in masks:
        mask[:, 0] = True
    return [(torch.randint(0, 96, (rows, 12)), torch.randint(0, 96, (rows, 12)), mask) for mask in masks]


def test_the_gradient_is_that_of_the_mean_loss_over_all_micro_batches():
    net, parts, found = model(), micro_batches(), []
    together = [tuple(torch.cat(pair) for pair in zip(*parts, strict=True))]
    for cut in (parts, together):
        catcher = Catcher(net)
        metrics = training_step(net, cut, [catcher], 0.0, one_process())
        found.append((catcher.gradient, metrics))
    input, target, mask = together[0]
    loss = torch.nn.functional.cross_entropy(net(input)[mask], target[mask])
    loss.backward()
    for gradient, metrics in found:
        assert (gradient - flat_gradient(net)).norm() < 1e-4 * gradient.norm()
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
        assert metrics["grad_norm"] == pytest.approx(float(flat_gradient(net).norm()), rel=1e-4)
        assert metrics["accuracy"] == pytest.approx(found[0][1]["accuracy"])


def new_trainer(dataset, out_dir, **settings):
    c = PretrainConfig(**{"dataset": dataset, "out_dir": str(out_dir), "block_size": 32, "n_layer": 1, "n_embd": 16,
                          "n_head": 2, "batch_size": 4, "learning_rate": 1e-2, "lr_decay_iters": 6, "warmup_iters": 2,
                          "log_interval": 1, "eval_interval": 3, "save_interval": 3, "eval_batches": 2,
                          "dropout": 0.1, "device": "cpu", "max_iters": 6} | settings)
    dist = one_process()
    data = build_data(c, dist)
    batches, evaluate = build_batches(c, data, dist)
    return Trainer(build_model(c, data, dist), c, batches, evaluate, data.tokenizer,
                   Logger(c.out_dir, c.max_iters, COLUMNS), dist)


def train(dataset, out_dir, resume=False, **settings):
    trainer = new_trainer(dataset, out_dir, **settings)
    if resume:
        trainer.resume()
    trainer.run()
    return trainer


def records(folder):
    return without_clock(read_records(folder / "metrics.jsonl"))


def expect_whole(whole, resumed, folder):
    """A resumed run has the weights, the momentum and the records of the uninterrupted one, to the last bit."""
    assert whole.step == resumed.step == 6 and same(whole.model, resumed.model) and resumed.facts == whole.facts
    assert same_momentum(whole.optimizers, resumed.optimizers)
    assert records(folder / "whole") == records(folder / "cut")


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(dataset, tmp_path, capsys):
    whole = train(dataset, tmp_path / "whole", optimizer="muon")
    train(dataset, tmp_path / "cut", optimizer="muon", max_iters=3)
    expect_whole(whole, train(dataset, tmp_path / "cut", optimizer="muon", resume=True), tmp_path)
    found = records(tmp_path / "whole")
    assert len(found) == 8, "six steps and two evaluations"
    assert not undocumented({key for record in found for key in record} - {"step"})
    (tmp_path / "cut" / "state.pt").write_bytes(b"PK")
    expect_whole(whole, train(dataset, tmp_path / "cut", optimizer="muon", resume=True), tmp_path)
    assert "state.pt is damaged" in capsys.readouterr().out, "records of later steps are written again"


def test_max_iters_is_the_number_of_optimizer_steps_and_everything_is_written(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", itertools.count(1e9, -100).__next__)  # a clock that is set back does not matter
    trainer = train(dataset, tmp_path / "run", max_iters=5, gradient_accumulation_steps=2)
    counts = {int(s["step"]) for o in trainer.optimizers for s in o.state_dict()["state"].values() if "step" in s}
    assert counts == {5}
    assert {"metrics.jsonl", "model.safetensors", "state.pt"} <= set(os.listdir(tmp_path / "run"))
    final, facts = load_model(str(tmp_path / "run" / "model.safetensors"))
    assert same(final, trainer.model) and facts["step"] == 5 and "val_loss" in facts
    steps = [r for r in read_records(tmp_path / "run" / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5] and min(r["tokens_per_second"] for r in steps) > 0


def test_a_bad_step_is_named_and_the_save_that_it_prevents_is_made_up(dataset, tmp_path, capsys):
    saved, run = [], new_trainer(dataset, tmp_path, max_iters=5, gradient_accumulation_steps=2)
    states, save = run.model.states, run.save
    run.save = lambda: saved.append(run.step) or save()
    run.model.states = lambda *args: states(*args) * (torch.nan if run.step == 2 else 1.0)
    run.run()
    assert run.step == 5 and run.skipped_steps == 1 and saved == [4, 5], "one was due in step 3"
    assert "step 3 is skipped, because these are not finite: loss, grad_norm\n" in capsys.readouterr().out
