"""Files: whole or not at all, safe to load, and clear about what is wrong with them."""

import os
import pathlib

import pytest
import torch

from core import checkpoint_manager
from core.checkpoint_manager import CheckpointManager, set_aside
from core.models import load_model, save_model
from tests.tiny import TOKENIZER, model


def manager_of(folder, net, keep=0):
    return CheckpointManager(str(folder), lambda path, **facts: save_model(path, net, TOKENIZER, **facts), keep)


def write_folder(path, step, **facts):
    """A model that is a folder, as those in Hugging Face format are."""
    os.makedirs(path, exist_ok=True)
    (pathlib.Path(path) / "config.json").write_text(str(step))


def test_state_round_trip_and_keep(tmp_path):
    net = model(seed=1)
    manager = manager_of(tmp_path / "out", net, keep=2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    for step in (1, 2, 3):
        manager.save(step, net.state_dict(), [optimizer], {"val_loss": 1.5}, before={"x": 0.5})
    assert sorted(os.listdir(tmp_path / "out")) == ["model-000002.safetensors", "model-000003.safetensors",
                                                   "model.safetensors", "state.pt"]
    other = model(seed=2)
    fresh, untouched = torch.optim.AdamW(other.parameters()), {k: v.clone() for k, v in other.state_dict().items()}
    state = manager.load(other.state_dict(), [fresh])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert state["step"] == 3 and state["before"] == {"x": 0.5} and state["facts"] == {"val_loss": 1.5}
    assert all(torch.equal(state["model"][name], p) for name, p in net.state_dict().items())
    assert all(torch.equal(untouched[name], p) for name, p in other.state_dict().items()), "the caller loads them"
    assert load_model(str(tmp_path / "out" / "model.safetensors"))[1] == {"step": 3, "val_loss": 1.5}
    whole = (tmp_path / "out" / "state.pt").read_bytes()
    (tmp_path / "out" / "state.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="state.pt is damaged or cut short"):
        manager.load(other.state_dict(), [fresh])
    os.remove(tmp_path / "out" / "state.pt")
    with pytest.raises(FileNotFoundError, match="resume=True"):
        manager.load(other.state_dict(), [fresh])


def test_a_state_of_another_identity_is_refused_and_one_without_it_is_not(tmp_path):
    net = model()
    of = lambda identity: CheckpointManager(str(tmp_path), lambda path, **facts: None, identity=identity)
    of({"alpha": 2.0, "layers": ["a"]}).save(1, net.state_dict(), [], {})
    assert of({"alpha": 2.0, "layers": ["a"]}).load(net.state_dict(), [])["step"] == 1
    for identity, words in (({"alpha": 4.0, "layers": ["a"]}, "alpha=2.0, not 4.0"),
                            ({"alpha": 2.0, "layers": ["b"]}, r"layers=\['a'\], not \['b'\]")):
        with pytest.raises(ValueError, match=f"state.pt is of a run with {words}; resume with.*config.json") as error:
            of(identity).load(net.state_dict(), [])
        assert "\n" not in str(error.value)
    of({}).save(2, net.state_dict(), [], {})
    assert "identity" not in torch.load(tmp_path / "state.pt", weights_only=True), "native states as before"
    assert of({"alpha": 4.0}).load(net.state_dict(), [])["step"] == 2, "a state of an earlier version"


def test_the_last_models_are_kept_beyond_a_million_steps(tmp_path):
    net = model()
    manager = manager_of(tmp_path, net, keep=2)
    for step in (999998, 999999, 1000000):
        manager.save(step, net.state_dict(), [], {})
    assert manager.numbered() == ["model-999999.safetensors", "model-1000000.safetensors"]


def test_models_that_are_folders_are_numbered_and_removed_as_files_are(tmp_path):
    manager = CheckpointManager(str(tmp_path), write_folder, keep=2, suffix="")
    for step in (1, 2, 3):
        manager.save(step, {}, [], {})
    assert sorted(os.listdir(tmp_path)) == ["model", "model-000002", "model-000003", "state.pt"]
    assert contents(tmp_path / "model-000002") == {"config.json": "2"}
    assert contents(tmp_path / "model") == {"config.json": "3"} and manager.numbered() == ["model-000002",
                                                                                           "model-000003"]


@pytest.mark.parametrize("suffix, others", [("", ("model-1.safetensors", "model-1-notes", "model-x", "my-model-1")),
                                            (".safetensors", ("model-1", "model-1xsafetensors", "model-1.bin"))])
def test_only_models_of_its_own_kind_are_numbered(tmp_path, suffix, others):
    for name in others:
        (tmp_path / name).mkdir()
    manager = CheckpointManager(str(tmp_path), write_folder, keep=1, suffix=suffix)
    manager.save(7, {}, [], {})
    manager.save(8, {}, [], {})
    assert manager.numbered() == [f"model-000008{suffix}"] and set(others) <= set(os.listdir(tmp_path))


def test_state_is_loaded_without_running_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    os.makedirs(tmp_path / "out")
    torch.save({"step": 1, "model": Bomb()}, tmp_path / "out" / "state.pt")
    with pytest.raises(ValueError, match="damaged"):
        manager_of(tmp_path / "out", None).load(model().state_dict(), [])
    assert not (tmp_path / "boom").exists()


def test_a_state_of_another_model_is_refused(tmp_path):
    net = model()
    manager = manager_of(tmp_path, net)
    manager.save(1, net.state_dict(), [torch.optim.AdamW(net.parameters())], {})
    for other, kind in ((model(n_layer=2), torch.optim.AdamW), (model(), torch.optim.SGD)):
        with pytest.raises(ValueError, match="another model or optimizer.*config.json"):
            manager.load(other.state_dict(), [kind(other.parameters())])


def test_a_state_of_an_earlier_version_still_loads(tmp_path):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    shapes = {name: list(p.shape) for name, p in net.state_dict().items()}
    torch.save({"step": 4, "facts": {}, "layout": {"weights": shapes, "optimizers": ["AdamW"]},
                "model": net.state_dict(), "optimizers": [optimizer.state_dict()]}, tmp_path / "state.pt")
    state = manager_of(tmp_path, net).load(net.state_dict(), [optimizer])
    assert state["step"] == 4 and set(state["model"]) == set(net.state_dict())


class Cut(Exception):
    """The power failed."""


def cut_after(monkeypatch, count):
    """The operation on files number `count` (from 0) and all later ones do not happen."""
    left = [count]

    def limited(real):
        def operation(*arguments):
            if left[0] == 0:
                raise Cut
            left[0] -= 1
            return real(*arguments)
        return operation

    for name in ("replace", "remove"):
        monkeypatch.setattr(checkpoint_manager.os, name, limited(getattr(os, name)))


class Run:
    """A run of three steps that saves at every one; the weights of a step are that number."""

    def __init__(self, folder, resume):
        self.net = model()
        self.manager = manager_of(folder, self.net, keep=2)
        self.step = self.manager.load(self.net.state_dict(), [])["step"] if resume else 0

    def to_the_end(self):
        while self.step < 3:
            self.step += 1
            with torch.no_grad():
                for p in self.net.parameters():
                    p.fill_(self.step)
            self.manager.save(self.step, self.net.state_dict(), [], {})


@pytest.mark.parametrize("count", range(11))
def test_a_run_whose_save_was_cut_anywhere_ends_with_its_last_model(tmp_path, monkeypatch, count):
    with monkeypatch.context() as patch:
        cut_after(patch, count)
        try:
            Run(tmp_path, resume=False).to_the_end()
            assert count >= 10, "nine files are put in place and one is removed"
        except Cut:
            assert count < 10
    Run(tmp_path, resume=(tmp_path / "state.pt").exists()).to_the_end()
    for name, step in (("model", 3), ("model-000003", 3), ("model-000002", 2)):
        net, facts = load_model(str(tmp_path / f"{name}.safetensors"))
        assert facts == {"step": step} and all((p == step).all() for p in net.parameters())
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 3 and all((p == 3).all() for p in state["model"].values())


def write(folder, **files):
    os.makedirs(folder, exist_ok=True)
    for name, text in files.items():
        (pathlib.Path(folder) / name).write_text(text)


def contents(folder):
    """{path within the folder: text} of all files in it."""
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(pathlib.Path(folder).rglob("*")) if p.is_file()}


A = {"config": "A", "metrics": "A", "model": "A", "state.pt": "A"}


def in_folder(folder, files):
    return {os.path.join(folder, name): text for name, text in files.items()}


def test_earlier_runs_are_set_aside_one_by_one(tmp_path):
    write(tmp_path, **A)
    assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", "1")
    assert contents(tmp_path) == in_folder("previous/1", A)
    assert set_aside(str(tmp_path)) is None and set_aside(str(tmp_path / "nowhere")) is None
    assert contents(tmp_path) == in_folder("previous/1", A) and not (tmp_path / "nowhere").exists()


def test_two_failed_starts_leave_the_run_before_them_whole(tmp_path):
    write(tmp_path, **A)
    for number, failed in enumerate(("B", "C", "D"), 1):
        assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", str(number))
        write(tmp_path, config=failed)
    assert contents(tmp_path) == {"config": "D", **in_folder("previous/1", A), "previous/2/config": "B",
                                  "previous/3/config": "C"}


@pytest.mark.parametrize("count", range(len(A) + 1))
def test_a_move_that_was_interrupted_goes_on_at_the_next_start(tmp_path, monkeypatch, count):
    write(tmp_path, **A)
    with monkeypatch.context() as patch:
        cut_after(patch, count)
        with pytest.raises(Cut):
            set_aside(str(tmp_path))
    assert sorted(contents(tmp_path).values()) == ["A"] * len(A)
    assert count == 0 or not (tmp_path / "state.pt").exists(), "half a run is not resumed"
    assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", "1")
    assert contents(tmp_path) == in_folder("previous/1", A)


def test_a_run_after_an_interrupted_move_overwrites_nothing_of_it(tmp_path, monkeypatch):
    write(tmp_path, **A)
    with monkeypatch.context() as patch:
        cut_after(patch, 2)
        with pytest.raises(Cut):
            set_aside(str(tmp_path))
    moved = {name for name in os.listdir(tmp_path / "previous" / "partial")}
    write(tmp_path, **{name: "B" for name in moved})
    set_aside(str(tmp_path))
    texts = list(contents(tmp_path).values())
    assert texts.count("A") == len(A) and texts.count("B") == len(moved) == 2


def test_an_earlier_run_of_an_older_version_stays_where_it_is(tmp_path):
    write(tmp_path / "previous", **A)
    write(tmp_path, **{"state.pt": "B"})
    assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", "1")
    assert contents(tmp_path) == in_folder("previous", A) | {"previous/1/state.pt": "B"}


def test_folders_of_a_run_stay_and_numbers_are_not_used_again(tmp_path):
    write(tmp_path / "wandb", log="x")
    write(tmp_path / "previous" / "9", log="y")
    write(tmp_path, log="z")
    assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", "10")
    assert contents(tmp_path) == {"wandb/log": "x", "previous/9/log": "y", "previous/10/log": "z"}


def test_models_that_are_folders_are_set_aside_with_their_run_and_other_folders_stay(tmp_path):
    for name in ("model", "model-000002", "notes", "model-notes"):
        write(tmp_path / name, **{"config.json": name})
    write(tmp_path, **{"state.pt": "A"})
    assert set_aside(str(tmp_path)) == os.path.join(tmp_path, "previous", "1")
    moved = {"model/config.json": "model", "model-000002/config.json": "model-000002", "state.pt": "A"}
    assert contents(tmp_path) == in_folder("previous/1", moved) | {"notes/config.json": "notes",
                                                                   "model-notes/config.json": "model-notes"}
