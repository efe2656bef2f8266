"""Supervised training: the gradient of a step, and what a run counts, writes and resumes."""

import itertools
import os
import time

import pytest
import torch

from core.logger import Logger
from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.models import load_model
from core.supervised.build import build_batches, build_data, build_model
from core.supervised.config import PretrainConfig
from core.trainer import COLUMNS, Trainer, supervised_sums, training_step
from tests.tiny import (
    Catcher,
    clear_gradient,
    counted,
    flat_gradient,
    model,
    one_process,
    read_records,
    same,
    same_momentum,
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


def test_supervised_losses_against_loops():
    tokens, target = torch.randint(0, 96, (2, 12)), torch.randint(0, 96, (2, 12))
    mask = torch.rand(2, 12) < 0.5
    mask[:, 3] = True
    net = model()
    sums = supervised_sums(net, tokens, target, mask)
    by_hand = -sum(net(tokens)[i, t].log_softmax(-1)[target[i, t]] for i in range(2) for t in range(12) if mask[i, t])
    torch.testing.assert_close(sums["loss"], by_hand)
    assert sums["count"] == mask.sum()

    scorer = model(SEQUENCE_SCORER)
    shown = torch.where(mask, tokens, target)
    p = scorer(shown).sigmoid()
    by_hand = -sum((p[i, t] if shown[i, t] == target[i, t] else 1 - p[i, t]).log() for i in range(2) for t in range(12))
    sums = supervised_sums(scorer, shown, target, mask)
    torch.testing.assert_close(sums["loss"], by_hand, rtol=1e-4, atol=1e-4)
    assert sums["count"] == 24

    scorer = model(SEQUENCE_SCORER, judge_head="cls")
    with_cls = torch.cat((torch.full((2, 1), 98), shown), 1)
    by_hand = 0.0
    for i in range(2):
        x = sum(int(a != b) for a, b in zip(shown[i], target[i], strict=True)) / 12
        by_hand = by_hand + (scorer(with_cls)[i].sigmoid() - (x**4 - 2 * x**3 + 2 * x)) ** 2
    torch.testing.assert_close(supervised_sums(scorer, with_cls, target, mask)["loss"], by_hand)


@pytest.mark.parametrize(("mode", "tied"), [(MASKED_FILL, True), (LANGUAGE_MODEL, False)])
def test_the_loss_is_the_same_in_parts_of_few_logits(mode, tied, monkeypatch):
    net, sizes, found = model(mode, tied=tied), [], []
    monkeypatch.setattr(net, "project", counted(net.project, sizes))
    tokens = torch.randint(0, 96, (6, 24))
    target = torch.where(torch.rand(6, 24) < 0.5, net(tokens).argmax(-1), torch.randint(0, 96, (6, 24)))
    mask = torch.rand(6, 24) < 0.6
    by_hand = sum(int(net(tokens)[i, t].argmax() == target[i, t]) for i in range(6) for t in range(24) if mask[i, t])
    for rows in (10**5, 20):
        monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", rows * 96)
        clear_gradient(net)
        sizes.clear()
        sums = supervised_sums(net, tokens, target, mask)
        sums["loss"].backward()
        assert max(sizes) <= rows and sums["correct"] == by_hand > 10
        found.append((sums["loss"].detach(), flat_gradient(net)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
