"""The supervised loop: what it counts, writes and resumes."""

import itertools
import os
import signal
import time

import pytest
import torch

from core import trainer as trainer_module
from core.files.json_lines import read_records
from core.logger import Logger
from core.models import load_model
from core.supervised.build import build_batches, build_data, build_model
from core.supervised.config import PretrainConfig
from core.trainer import COLUMNS, Trainer
from tests.tiny import one_process, same, same_momentum, undocumented, without_clock


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


def test_a_clock_that_is_set_back_does_not_matter(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", itertools.count(1e9, -100).__next__)
    train(dataset, tmp_path, max_iters=3)
    speeds = [r["tokens_per_second"] for r in read_records(tmp_path / "metrics.jsonl") if "tokens_per_second" in r]
    assert len(speeds) == 3 and min(speeds) > 0


def test_max_iters_is_the_number_of_optimizer_steps_and_everything_is_written(dataset, tmp_path):
    trainer = train(dataset, tmp_path / "run", max_iters=5, export=str(tmp_path / "shipped.safetensors"),
                    gradient_accumulation_steps=2)
    counts = {int(s["step"]) for o in trainer.optimizers for s in o.state_dict()["state"].values() if "step" in s}
    assert counts == {5}
    assert sorted(os.listdir(tmp_path / "run")) == ["console.log", "metrics.jsonl", "model.safetensors",
                                                   "state-000003.pt", "state.pt"]
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
    with pytest.raises(ValueError, match="3 steps in a row had a loss, gradient or reward that is not finite"):
        good.run()
    assert good.step == 3


def test_the_batch_of_a_bad_step_is_kept_and_a_run_repeats_it(dataset, tmp_path, capsys):
    batches, runs = [], []
    for name in ("bad", "again"):
        run = new_trainer(dataset, tmp_path / name, max_iters=4, save_interval=1, gradient_accumulation_steps=2)
        inner = run.batches
        run.batches = lambda *which, inner=inner: batches.append(inner(*which)) or batches[-1]
        states = run.model.states
        run.model.states = lambda *args, states=states, run=run: states(*args) * (torch.nan if run.step == 2 else 1.0)
        saved, save = [], run.save
        run.save = lambda: saved.append(run.step) or save()
        run.run()
        runs.append(run)
        assert run.skipped_steps == 1 and saved == [1, 2, 4], "no state is saved in a bad step"
    assert same(runs[0].model, runs[1].model)
    assert os.listdir(tmp_path / "bad" / "bad_steps") == ["step-000003-rank-0.pt"]
    found = torch.load(tmp_path / "bad" / "bad_steps" / "step-000003-rank-0.pt", weights_only=True)
    assert found["step"] == 3 and found["not_finite"] == ["loss", "grad_norm"] and found["config"]["max_iters"] == 4
    for i, name in enumerate(("input", "target", "mask")):
        assert all(torch.equal(x, batch[i]) for x, batch in zip(found[name], batches[4:6], strict=True))
    assert "step 3 is skipped, because these are not finite: loss, grad_norm; its batch is in" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_and_a_resumed_run_has_the_same_bits(dataset, tmp_path, monkeypatch,
                                                                                capsys, number):
    whole, steps, real = train(dataset, tmp_path / "whole"), [], trainer_module.training_step

    def interrupted(*arguments):
        steps.append(1)
        if len(steps) == 4:
            os.kill(os.getpid(), number)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "training_step", interrupted)
        cut = train(dataset, tmp_path / "cut", export=str(tmp_path / "shipped.safetensors"))
    assert cut.step == 4 and not (tmp_path / "shipped.safetensors").exists()
    assert f"stopped by {signal.Signals(number).name} after step 4; go on with --resume=True" in capsys.readouterr().out
    resumed = train(dataset, tmp_path / "cut", resume=True)
    assert resumed.step == 6 and same(whole.model, resumed.model)
    records = [without_clock(read_records(tmp_path / name / "metrics.jsonl")) for name in ("whole", "cut")]
    assert records[0] == records[1]


def test_a_save_that_a_bad_step_prevents_is_made_up_after_the_next_good_one(dataset, tmp_path):
    run = new_trainer(dataset, tmp_path, max_iters=8, save_interval=3, eval_interval=9)
    states, save, saved = run.model.states, run.save, []
    run.model.states = lambda *arguments: states(*arguments) * (torch.nan if run.step in (2, 3) else 1.0)
    run.save = lambda: saved.append(run.step) or save()
    run.run()
    assert run.skipped_steps == 2 and saved == [5, 6, 8]


def test_after_a_signal_the_run_is_saved_at_once_and_evaluated_when_it_goes_on(dataset, tmp_path, monkeypatch):
    """The evaluation of step 3 is the resumed run's, unless the signal comes in it."""
    whole, real = train(dataset, tmp_path / "whole"), trainer_module.training_step
    for name, in_step in (("step", True), ("evaluation", False)):
        cut, evaluations = new_trainer(dataset, tmp_path / name), []
        evaluate = cut.evaluate

        def step(*arguments, cut=cut, in_step=in_step):
            if in_step and cut.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*arguments)

        def evaluating(model, evaluate=evaluate, evaluations=evaluations):
            evaluations.append(1)
            os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(model)

        cut.evaluate = evaluating
        with monkeypatch.context() as patch:
            patch.setattr(trainer_module, "training_step", step)
            cut.run()
        assert cut.step == 3 and len(evaluations) == (not in_step) and cut.evaluated == (not in_step)
        resumed = train(dataset, tmp_path / name, resume=True)
        assert resumed.step == 6 and same(whole.model, resumed.model) and resumed.facts == whole.facts
        records = [without_clock(read_records(tmp_path / x / "metrics.jsonl")) for x in ("whole", name)]
        assert records[0] == records[1]


@pytest.mark.parametrize("skipped", [None, -1, "3"])
def test_a_state_without_a_valid_count_of_skipped_steps_is_refused_in_one_line(dataset, tmp_path, skipped):
    train(dataset, tmp_path, max_iters=1)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    torch.save(state | {"skipped_steps": skipped}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="state.pt was not saved by supervised training, or has changed") as error:
        train(dataset, tmp_path, resume=True)
    assert "\n" not in str(error.value)


def test_after_a_damaged_state_the_records_of_later_steps_are_written_again(dataset, tmp_path, capsys):
    whole = train(dataset, tmp_path / "whole", save_interval=2)
    train(dataset, tmp_path / "cut", save_interval=2, max_iters=4)
    (tmp_path / "cut" / "state.pt").write_bytes(b"PK")
    resumed = train(dataset, tmp_path / "cut", save_interval=2, resume=True)
    assert "state.pt is damaged" in capsys.readouterr().out and same(whole.model, resumed.model)
    records = [without_clock(read_records(tmp_path / name / "metrics.jsonl")) for name in ("whole", "cut")]
    assert records[0] == records[1]
