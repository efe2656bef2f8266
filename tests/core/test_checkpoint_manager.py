"""States and models of a run: whole or not at all, safe to load, and clear about what is wrong with them."""

import contextlib
import io
import os

import pytest
import torch

from core.checkpoint_manager import CheckpointManager, read_state, states
from core.models import load_model, save_model
from tests.tiny import TOKENIZER, Cut, cut_after, model


def manager_of(folder, net):
    return CheckpointManager(str(folder), lambda path, **facts: save_model(path, net, TOKENIZER, **facts))


def without_models(folder, **settings):
    return CheckpointManager(str(folder), lambda path, **facts: None, **settings)


def save_steps(folder, net, steps):
    """A manager that has saved these steps; the weights of a step are that number."""
    manager = without_models(folder)
    for step in steps:
        manager.save(step, {name: torch.full_like(p, step) for name, p in net.state_dict().items()}, [], {})
    return manager


def test_a_state_is_read_back_and_the_last_two_are_kept(tmp_path):
    net = model(seed=1)
    manager = manager_of(tmp_path / "out", net)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.5)
    net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    for step in (1, 2, 3):
        manager.save(step, net.state_dict(), [optimizer], {"val_loss": 1.5}, before={"x": 0.5})
    assert sorted(os.listdir(tmp_path / "out")) == ["model.safetensors", "state-before.pt", "state.pt"]
    other = model(seed=2)
    fresh = torch.optim.AdamW(other.parameters(), weight_decay=0.1)
    untouched = {name: p.clone() for name, p in other.state_dict().items()}
    state = manager.load(other.state_dict(), [fresh])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert fresh.param_groups[0]["weight_decay"] == 0.1, "the setting of the run that resumes"
    assert state["step"] == 3 and state["before"] == {"x": 0.5} and state["facts"] == {"val_loss": 1.5}
    assert all(torch.equal(state["model"][name], p) for name, p in net.state_dict().items())
    assert all(torch.equal(untouched[name], p) for name, p in other.state_dict().items()), "the caller loads them"
    assert load_model(str(tmp_path / "out" / "model.safetensors"))[1] == {"step": 3, "val_loss": 1.5}
    mapped = read_state(tmp_path / "out" / "state.pt", mapped=True)["model"]
    assert all(torch.equal(mapped[name], p) for name, p in net.state_dict().items())
    with pytest.raises(FileNotFoundError, match="resume=True"):
        without_models(tmp_path).load(other.state_dict(), [fresh])


def test_a_state_of_another_model_optimizer_or_identity_is_refused_in_one_line(tmp_path):
    net = model()
    without_models(tmp_path, identity={"alpha": 2.0}).save(1, net.state_dict(), [torch.optim.AdamW(net.parameters())], {})
    for net, kind, identity, words in (
            (model(n_layer=2), torch.optim.AdamW, {"alpha": 2.0}, "weights"),
            (model(), torch.optim.SGD, {"alpha": 2.0}, "optimizers"), (model(), torch.optim.AdamW, {"alpha": 4.0}, "alpha")):
        with pytest.raises(ValueError, match=f"state.pt is of a run that differs in {words}; resume with.*config.json") as error:
            without_models(tmp_path, identity=identity).load(net.state_dict(), [kind(net.parameters())])
        assert "\n" not in str(error.value)


def test_a_state_is_loaded_without_running_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    torch.save({"step": 1, "model": Bomb()}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="state.pt is damaged or cut short"):
        without_models(tmp_path).load(model().state_dict(), [])
    assert not (tmp_path / "boom").exists()


def run_of_three_steps(folder):
    """Saves at every step, from the last state on; the weights of a step are that number."""
    net = model()
    manager = manager_of(folder, net)
    step = manager.load(net.state_dict(), [])["step"] if states(str(folder)) else 0
    for step in range(step + 1, 4):
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(step)
        manager.save(step, net.state_dict(), [], {})


@pytest.mark.slow
def test_a_run_whose_save_was_cut_anywhere_ends_with_its_last_model(tmp_path, monkeypatch):
    """Eight files are put in place."""
    for count in range(9):
        folder = tmp_path / str(count)
        with monkeypatch.context() as patch, pytest.raises(Cut) if count < 8 else contextlib.nullcontext():
            cut_after(patch, count)
            run_of_three_steps(folder)
        run_of_three_steps(folder)
        net, facts = load_model(str(folder / "model.safetensors"))
        assert facts == {"step": 3} and all((p == 3).all() for p in net.parameters())
        state = torch.load(folder / "state.pt", weights_only=True)
        assert state["step"] == 3 and all((p == 3).all() for p in state["model"].values())


def cut(whole):
    return whole[:1000]


def with_nan(whole):
    state = torch.load(io.BytesIO(whole), weights_only=True)
    next(iter(state["model"].values())).view(-1)[3] = torch.nan
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.parametrize("damage", [cut, with_nan, lambda whole: b""], ids=["cut", "NaN", "empty"])
def test_a_damaged_state_is_named_and_the_one_before_it_is_used(tmp_path, damage):
    net, told, newest, before = model(), [], tmp_path / "state.pt", tmp_path / "state-before.pt"
    save_steps(tmp_path, net, (1, 2))
    newest.write_bytes(damage(newest.read_bytes()))
    manager = without_models(tmp_path)
    state = manager.load(net.state_dict(), [], told.append)
    assert state["step"] == 1 and all((p == 1).all() for p in state["model"].values())
    assert len(told) == 1 and told[0].startswith(str(newest)) and "\n" not in told[0]
    manager.save(2, net.state_dict(), [], {})
    newest.write_bytes(damage(newest.read_bytes()))
    assert manager.load(net.state_dict(), [], told.append)["step"] == 1, "a damaged state never replaces a whole one"
    before.write_bytes(damage(before.read_bytes()))
    with pytest.raises(ValueError, match=f"^{before}[^\n]*$"):
        manager.load(net.state_dict(), [], told.append)
