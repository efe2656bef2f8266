"""keep_best: the best model by a held-out metric stays beside the last one, as a run that resumes."""

import json
import math
import os
import shutil

import pytest
import torch

from core.checkpoint_manager import read_state
from core.errors import Mistake
from core.models import load_model
from core.run import check_run_folder, locked, set_aside
from grpo.grpo_config import GRPOConfig
from tests.runs.test_resume import expect_bits
from tests.tiny import Cut, cut_after, run_here, same
from tests.trainers import records, run, trainer

pytestmark = pytest.mark.usefixtures("without_pictures")
SETTINGS = {"max_iters": 4, "lr_decay_iters": 4, "learning_rate": 1e-2, "eval_interval": 1, "sample_interval": 1,
            "save_interval": 100}
RISES_TO_3 = (0.1, 0.2, 0.3, 0.4, 0.1)  # the metric at the steps 0, 1, ...


def scripted(dataset, out_dir, values=RISES_TO_3, metric="x", name=None, **settings):
    """A trainer whose held-out metric has the values at the steps 0, 1, ...; it is not measured where there is none."""
    t = trainer(dataset, out_dir, keep_best=f"eval/{name or metric}", **SETTINGS | settings)

    def evaluation(policy, temperature):
        value = values[t.step]
        return {"kl": 0.0} | ({} if value is None else {metric: value}), []

    t.evaluation = evaluation
    return t


def step_of_best(out_dir):
    """The step of the state in best/, whose model is that of the state and whose records end there; None: no best/."""
    best = os.path.join(out_dir, "best")
    if not os.path.exists(best):
        return None
    state = read_state(os.path.join(best, "state.pt"))
    net, _ = load_model(os.path.join(best, "model.safetensors"))
    assert all(torch.equal(x, net.weights()[name]) for name, x in state["model"].items())
    assert records(best)[-1]["step"] == state["step"] == state["best"]["step"]
    return state["step"]


@pytest.mark.parametrize("metric, values, step", [
    ("x", (0.1, 0.3, 0.2, 0.3, 0.2), 1), ("x", (0.5, 0.3, 0.2, 0.3, 0.5), 0), ("x", (-4.0, -3.0, -2.0, -1.0, 0.0), 4),
    ("x", (math.nan, 0.2, math.nan, math.inf, 0.1), 1), ("x", (0.1, None, 0.2, None, 0.1), 2),
    ("x", (math.nan,) * 5, None), ("truncated", (0.5, 0.3, 0.2, 0.2, 0.4), 2), ("code_failed", (0.1,) * 5, 0),
    ("environment/failed", (0.0, 0.1, -0.1, 0.1, 0.1), 2), ("reward/truncated", (0.5, 0.3, 0.2, 0.2, 0.6), 4)], ids=str)
def test_the_best_model_is_that_of_the_earliest_evaluation_that_no_other_beats(dataset, tmp_path, metric, values, step):
    t = run(scripted(dataset, tmp_path, values, metric))
    assert t.best.step == step_of_best(tmp_path) == step
    assert step is None or t.best.value == values[step]
    assert read_state(tmp_path / "state.pt")["step"] == 4, "the last model stays"


@pytest.mark.parametrize("step", [0, 3])
def test_the_best_run_resumes_as_the_run_went_on_to_the_last_bit(dataset, tmp_path, step):
    values = list(RISES_TO_3)
    values[step] = 0.9
    settings = {"ppo_epochs": 2, "reference_mode": "ema"}
    whole = run(scripted(dataset, tmp_path, values, **settings))
    assert step_of_best(tmp_path) == step
    resumed = run(scripted(dataset, tmp_path / "best", values, **settings), resume=True)
    expect_bits(whole, resumed)
    assert [x["step"] for x in records(tmp_path / "best")] == [x["step"] for x in records(tmp_path)]
    assert resumed.best == whole.best
    assert step_of_best(tmp_path / "best") == step, "its best model stays beside its last"


@pytest.mark.parametrize("cut", [1, 3])  # before and after the best step
def test_a_resumed_run_keeps_the_best_model_of_the_uninterrupted_one(dataset, tmp_path, cut):
    values = (0.1, 0.2, 0.9, 0.3, 0.8)
    run(scripted(dataset, tmp_path / "whole", values))
    run(scripted(dataset, tmp_path / "cut", values, max_iters=cut))
    run(scripted(dataset, tmp_path / "cut", values), resume=True)
    one, two = (tmp_path / name / "best" / "model.safetensors" for name in ("whole", "cut"))
    assert step_of_best(tmp_path / "whole") == step_of_best(tmp_path / "cut") == 2
    assert one.read_bytes() == two.read_bytes()


def test_a_cut_at_any_file_leaves_a_best_state_and_model_and_the_resumed_run_has_the_last(
        dataset, tmp_path, monkeypatch):
    run(scripted(dataset, tmp_path / "first", max_iters=1))
    whole = run(scripted(dataset, tmp_path / "whole", max_iters=2))
    states, models = [], [(tmp_path / name / "best" / "model.safetensors").read_bytes() for name in ("first", "whole")]
    for count in range(100):
        out = tmp_path / str(count)
        best = out / "best"
        shutil.copytree(tmp_path / "first", out)
        with monkeypatch.context() as patch:
            t = scripted(dataset, out, max_iters=2)
            t.resume()
            cut_after(patch, count)
            try:
                t.run()
                break
            except Cut:
                pass
        step, model = read_state(best / "state.pt")["step"], models.index((best / "model.safetensors").read_bytes()) + 1
        states.append((step, model, records(best)[-1]["step"]))
        again = tmp_path / f"{count}-best"
        shutil.copytree(best, again)
        resumed = run(scripted(dataset, again, max_iters=2), resume=True)
        assert same(whole.policy, resumed.policy) and [x["step"] for x in records(again)] == [0, 1, 1, 2, 2]
        resumed = run(scripted(dataset, out, max_iters=2), resume=True)
        assert same(whole.policy, resumed.policy) and step_of_best(out) == 2
        assert sorted(os.listdir(best)) == ["metrics.jsonl", "model.safetensors", "samples.jsonl", "state.pt"]
        assert not [name for name in os.listdir(out) if name.endswith(".tmp")]
    assert set(states) == {(1, 1, 1), (1, 1, 2), (1, 2, 2)} and states == sorted(states)


@pytest.mark.parametrize("name", ["nothing", "eval/x"])
def test_a_metric_that_does_not_exist_is_refused_before_the_first_step(dataset, tmp_path, monkeypatch, name):
    t = scripted(dataset, tmp_path, name=name)
    monkeypatch.setattr(t, "train_step", pytest.fail)
    with pytest.raises(Mistake, match="keep_best="):
        t.run()


def test_a_metric_that_is_neither_better_high_nor_low_is_refused():
    for name in ("entropy", "kl", "completion_length"):
        with pytest.raises(Mistake, match="keep_best="):
            GRPOConfig(keep_best=f"eval/{name}")


def test_a_metric_that_is_chosen_later_begins_with_the_model_that_resumes(dataset, tmp_path):
    run(trainer(dataset, tmp_path, **SETTINGS | {"max_iters": 2}))
    state = read_state(tmp_path / "state.pt")
    del state["best"]  # as in earlier versions
    torch.save(state, tmp_path / "state.pt")
    run(scripted(dataset, tmp_path, (None, None, 0.9, 0.3, 0.4)), resume=True)
    assert step_of_best(tmp_path) == 2
    t = scripted(dataset, tmp_path, name="nothing", max_iters=5)
    with pytest.raises(Mistake, match="keep_best="):
        run(t, resume=True)
    assert t.step == 4


def test_a_new_run_sets_the_best_model_aside_and_nothing_of_the_users_is_lost(dataset, tmp_path):
    best = tmp_path / "best"
    run(scripted(dataset, tmp_path, max_iters=1))
    (best / "notes.txt").write_text("mine")
    run(scripted(dataset, tmp_path, max_iters=2), resume=True)
    assert step_of_best(tmp_path) == 2 and (best / "notes.txt").read_text() == "mine"
    (best / "console.log").write_text("a run has resumed here")
    run(scripted(dataset, tmp_path), resume=True)
    assert step_of_best(tmp_path) == 3 and step_of_best(tmp_path / "previous" / "1") == 2
    assert (tmp_path / "previous" / "1" / "best" / "notes.txt").read_text() == "mine"
    (best / "state.pt").unlink()  # a kill before the first state
    check_run_folder(str(tmp_path))
    set_aside(str(tmp_path))
    assert os.listdir(tmp_path) == ["previous"]
    assert (tmp_path / "previous" / "2" / "best" / "model.safetensors").exists()
    best.mkdir()
    (best / "notes.txt").write_text("mine too")
    assert set_aside(str(tmp_path)) is None and (best / "notes.txt").exists()


def test_what_is_not_of_this_run_in_the_folder_of_the_best_model_is_kept(dataset, tmp_path):
    best = tmp_path / "best"
    best.mkdir()
    (best / "model.safetensors").write_text("mine")
    t = scripted(dataset, tmp_path)
    with pytest.raises(Mistake, match="best"):
        run(t)
    assert t.step == 0 and (best / "model.safetensors").read_text() == "mine"
    shutil.rmtree(best)
    run(scripted(dataset, tmp_path, max_iters=3), resume=True)
    assert step_of_best(tmp_path) == 3
    run(scripted(dataset, tmp_path, (None, None, None, 0.1, 0.2), metric="y"), resume=True)
    assert step_of_best(tmp_path) == 4 and step_of_best(tmp_path / "previous" / "1") == 3
    (best / "console.log").write_text("a run trains here")
    with locked(best), pytest.raises(Mistake, match="best"):
        run(scripted(dataset, tmp_path, (None,) * 5 + (0.3,), metric="y", max_iters=5), resume=True)
    assert step_of_best(tmp_path) == 4


def test_pretraining_keeps_the_model_with_the_lowest_loss(dataset, tmp_path):
    out = tmp_path / "out"
    settings = {"dataset": dataset, "out_dir": out, "max_iters": 6, "eval_interval": 1, "save_interval": 50,
                "block_size": 32, "n_layer": 1, "n_embd": 16, "n_head": 2, "eval_batches": 1, "batch_size": 4,
                "learning_rate": 1.0, "lr_decay_iters": 100, "warmup_iters": 3, "keep_best": "val_loss",
                "device": "cpu"}
    done = run_here("core/pretrain.py", *(f"--{key}={value}" for key, value in settings.items()))
    assert done.returncode == 0, done.stderr
    losses = {record["step"]: record["val_loss"] for record in records(out) if "val_loss" in record}
    best = min(losses, key=losses.get)
    assert step_of_best(out) == best and list(losses) == list(range(7)) and best < 6
    done = run_here("core/pretrain.py", "--resume=True", f"--out_dir={out}/best")
    assert done.returncode == 0, done.stderr
    assert (out / "best" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert json.loads((out / "best" / "config.json").read_text())["starts"][-1]["end"]["step"] == 6
