"""States, models and records of a run: whole or not at all, safe to load, of the right run."""

import contextlib
import json
import os
import stat

import pytest
import torch

from core.checkpoint_manager import CheckpointManager, read_state
from core.files import CannotWrite, each_record, keep_records, replacing
from core.logger import Logger, visible
from core.models import load_model, save_model
from tests.tiny import TOKENIZER, Cut, cut_after, model


def manager_of(folder, net, **settings):
    return CheckpointManager(str(folder), lambda path, **facts: save_model(path, net, TOKENIZER, **facts), **settings)


def trained():
    """(a model, its optimizer) after a step."""
    net = model(seed=1)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.5)
    net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("mapped", [False, True])
def test_a_state_gives_back_what_was_saved(tmp_path, mapped):
    net, optimizer = trained()
    manager = manager_of(tmp_path / "out", net)
    for step in (1, 2, 3):
        manager.save(step, net.state_dict(), [optimizer], {"val_loss": 1.5}, before={"x": 0.5})
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "state.pt"]
    other = model(seed=2)
    fresh = torch.optim.AdamW(other.parameters(), weight_decay=0.1)
    state = manager.load(other.state_dict(), [fresh])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert fresh.param_groups[0]["weight_decay"] == 0.1, "the setting of the run that resumes"
    assert state["step"] == 3 and state["before"] == {"x": 0.5} and state["facts"] == {"val_loss": 1.5}
    weights = read_state(tmp_path / "out" / "state.pt", mapped)["model"]
    assert all(torch.equal(weights[name], p) for name, p in net.state_dict().items())
    assert load_model(str(tmp_path / "out" / "model.safetensors"))[1] == {"step": 3, "val_loss": 1.5}


@pytest.mark.parametrize("layers, kind, alpha, differs", [
    (2, torch.optim.AdamW, 2.0, "weights"), (1, torch.optim.SGD, 2.0, "optimizers"),
    (1, torch.optim.AdamW, 4.0, "alpha")])
def test_a_state_of_another_model_optimizer_or_identity_is_refused(tmp_path, layers, kind, alpha, differs):
    net, optimizer = trained()
    manager_of(tmp_path, net, identity={"alpha": 2.0}).save(1, net.state_dict(), [optimizer], {})
    net = model(n_layer=layers)
    with pytest.raises(ValueError, match=f"state.pt .* {differs}[^\n]*config.json"):
        manager_of(tmp_path, net, identity={"alpha": alpha}).load(net.state_dict(), [kind(net.parameters())])


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("boom",)


@pytest.mark.parametrize("content", ["a pickle that runs code", "cut", "empty"])
def test_a_state_that_is_damaged_or_would_run_code_is_refused_in_one_line(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    torch.save({"step": 1, "model": Bomb() if content.startswith("a") else {}}, "state.pt")
    whole = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes({"cut": whole[:300], "empty": b""}.get(content, whole))
    with pytest.raises(ValueError, match="^[^\n]*state.pt [^\n]*without resume$"):
        manager_of(tmp_path, model()).load({}, [])
    assert not (tmp_path / "boom").exists()


def run_of_three_steps(folder):
    """Saves at every step, from the last state on; the weights of a step are that number."""
    net = model()
    manager, done = manager_of(folder, net), 0
    if (folder / "state.pt").exists():
        done = manager.load(net.state_dict(), [])["step"]
    for step in range(done + 1, 4):
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(step)
        manager.save(step, net.state_dict(), [], {})


@pytest.mark.parametrize("count", range(7))  # six files are put in place
def test_a_run_whose_save_was_cut_anywhere_ends_with_its_last_model(tmp_path, monkeypatch, count):
    with monkeypatch.context() as patch, pytest.raises(Cut) if count < 6 else contextlib.nullcontext():
        cut_after(patch, count)
        run_of_three_steps(tmp_path)
    run_of_three_steps(tmp_path)
    net, facts = load_model(str(tmp_path / "model.safetensors"))
    state = read_state(tmp_path / "state.pt")
    assert facts == {"step": 3} and state["step"] == 3
    assert all((p == 3).all() for p in [*net.parameters(), *state["model"].values()])


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_has_the_mode_that_open_gives(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *arguments, name=name, real=real: (done.append(name), real(*arguments))[1])
    (tmp_path / "plain").write_text("")
    with replacing(tmp_path / "new" / "a") as new:
        os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o600))
    assert done == ["fsync", "replace"]
    assert stat.S_IMODE((tmp_path / "new" / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


@pytest.mark.parametrize("error, ends", [
    (KeyboardInterrupt(), KeyboardInterrupt), (ValueError("x"), ValueError), (OSError(28, "No space"), CannotWrite)])
def test_a_write_that_fails_leaves_the_file_as_it_was_and_nothing_else(tmp_path, error, ends):
    (tmp_path / "a").write_text("before")
    with pytest.raises(ends), replacing(str(tmp_path / "a")) as new:
        (tmp_path / new).write_text("half")
        raise error
    assert os.listdir(tmp_path) == ["a"] and (tmp_path / "a").read_text() == "before"


def test_metrics_survive_a_crash_and_a_resume_drops_those_of_later_steps(tmp_path):
    logger = Logger(str(tmp_path), 10, ("loss",))
    logger.start()
    for step in (1, 2, 3):
        logger.log(step, {"loss": step / 8, "other": 5})
    with open(logger.path, "a") as f:
        f.write('{"step": 4, "lo')
    logger.start(2)
    logger.log(3, {"loss": float("nan")})
    found = [json.loads(line, parse_constant=pytest.fail) for line in open(logger.path)]
    assert found == [{"step": 1, "loss": 0.125, "other": 5}, {"step": 2, "loss": 0.25, "other": 5},
                     {"step": 3, "loss": None}]
    keep_records(logger.path, 0)
    assert not list(each_record(logger.path))


def test_a_damaged_record_is_named_and_nothing_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n\n{"step": 2}\nno JSON\n{"step": 4}')
    with pytest.raises(ValueError, match="metrics.jsonl, line 4"):
        keep_records(str(path), 2)
    assert path.read_text().count("\n") == 4


@pytest.mark.parametrize("character", "\x1b\r\x00\u202e\u200b\ud800")
def test_characters_that_a_terminal_obeys_or_does_not_show_are_replaced(character):
    assert visible(f"a{character}é 漢 🙂 \u0301") == "a\ufffdé 漢 🙂 \u0301"
