"""States, models and records of a run: whole or not at all, safe to load, of the right run."""

import contextlib
import json
import os

import pytest
import torch

from core.checkpoint_manager import CheckpointManager, read_state, states
from core.errors import Mistake
from core.files import each_record, keep_records
from core.logger import GREEN, PLAIN, Logger, visible
from core.models import load_model, save_model
from tests.tiny import TOKENIZER, Cut, cut_after, model


def manager_of(folder, net, **settings):
    return CheckpointManager(str(folder), lambda path, **facts: save_model(path, net, TOKENIZER, **facts), **settings)


def test_a_state_gives_back_what_was_saved(tmp_path):
    net = model(seed=1)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.5)
    net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    manager = manager_of(tmp_path / "out", net)
    for step in (2, 3):
        manager.save(step, net.state_dict(), [optimizer], {"val_loss": 1.5}, before={"x": 0.5})
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "state-before.pt", "state.pt"]
    other = model(seed=2)
    fresh = torch.optim.AdamW(other.parameters(), weight_decay=0.1)
    state = manager.load(other.state_dict(), [fresh])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert fresh.param_groups[0]["weight_decay"] == 0.1, "the setting of the run that resumes"
    assert state["step"] == 3 and state["before"] == {"x": 0.5} and state["facts"] == {"val_loss": 1.5}
    assert all(torch.equal(state["model"][name], p) for name, p in net.state_dict().items())
    assert load_model(str(tmp_path / "out" / "model.safetensors"))[1] == {"step": 3, "val_loss": 1.5}


@pytest.mark.parametrize("layers, kind, alpha, differs", [
    (2, torch.optim.AdamW, 2.0, "weights"), (1, torch.optim.SGD, 2.0, "optimizers"),
    (1, torch.optim.AdamW, 4.0, "alpha")])
def test_a_state_of_another_model_optimizer_or_identity_is_refused(tmp_path, layers, kind, alpha, differs):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    manager_of(tmp_path, net, identity={"alpha": 2.0}).save(1, net.state_dict(), [optimizer], {})
    net = model(n_layer=layers)
    with pytest.raises(Mistake, match=f"state.pt .* {differs}[^\n]*config.json"):
        manager_of(tmp_path, net, identity={"alpha": alpha}).load(net.state_dict(), [kind(net.parameters())])


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("boom",)


@pytest.mark.parametrize("kept", [None, 300, 0])
def test_a_state_that_is_damaged_or_would_run_code_is_refused_in_one_line(tmp_path, monkeypatch, kept):
    monkeypatch.chdir(tmp_path)
    torch.save({"step": 1, "model": Bomb()}, "state.pt")
    (tmp_path / "state.pt").write_bytes((tmp_path / "state.pt").read_bytes()[:kept])
    with pytest.raises(Mistake, match="^[^\n]*state.pt [^\n]*resume"):
        manager_of(tmp_path, model()).load({}, [])
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("kept", [1000, 0])
def test_of_a_damaged_state_the_one_before_is_used_and_kept(tmp_path, kept):
    net, told, newest = model(), [], tmp_path / "state.pt"
    manager = manager_of(tmp_path, net)
    for step in (1, 2):
        manager.save(step, net.state_dict(), [], {})
    for _ in range(2):  # what is saved after it does not replace the whole one by the damaged one
        newest.write_bytes(newest.read_bytes()[:kept])
        manager = manager_of(tmp_path, net)
        assert manager.load(net.state_dict(), [], told.append)["step"] == 1
        assert str(newest) in told[-1] and "\n" not in told[-1]
        manager.save(2, net.state_dict(), [], {})


def run_of_three_steps(folder):
    """Saves at every step, from the last state on; the weights of a step are that number."""
    net = model()
    manager, done = manager_of(folder, net), 0
    if states(str(folder)):
        done = manager.load(net.state_dict(), [])["step"]
    for step in range(done + 1, 4):
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(step)
        manager.save(step, net.state_dict(), [], {})


@pytest.mark.parametrize("count", range(9))  # eight files are put in place
def test_a_run_whose_save_was_cut_anywhere_ends_with_its_last_model(tmp_path, monkeypatch, count):
    with monkeypatch.context() as patch, pytest.raises(Cut) if count < 8 else contextlib.nullcontext():
        cut_after(patch, count)
        run_of_three_steps(tmp_path)
    run_of_three_steps(tmp_path)
    net, facts = load_model(str(tmp_path / "model.safetensors"))
    state = read_state(tmp_path / "state.pt")
    assert facts == {"step": 3} and state["step"] == 3
    assert all((p == 3).all() for p in [*net.parameters(), *state["model"].values()])


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


@pytest.mark.parametrize("character", "\x1b\r\x00\u202e\u200b\ud800")
def test_characters_that_a_terminal_obeys_or_does_not_show_are_replaced(character):
    assert visible(f"a{character}é 漢 🙂 \u0301") == "a\ufffdé 漢 🙂 \u0301"


def test_a_run_says_nothing_that_a_terminal_obeys_but_its_own_colors(tmp_path, capsys):
    Logger(str(tmp_path), 10, ()).say(f"a\x1b[2J\t{GREEN}b\u202e{PLAIN}\n\x1b[31mc")
    assert capsys.readouterr().out == f"a\ufffd[2J\t{GREEN}b\ufffd{PLAIN}\n\ufffd[31mc\n"
    assert (tmp_path / "console.log").read_text(encoding="utf-8") == "a\ufffd[2J\tb\ufffd\n\ufffd[31mc\n"
