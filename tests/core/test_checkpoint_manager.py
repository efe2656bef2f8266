"""Files: whole or not at all, safe to load, and clear about what is wrong with them."""

import errno
import os
import pathlib
import random
import zipfile

import pytest
import torch

from core.checkpoint_manager import CheckpointManager, read_state, states
from core.files.whole_files import CannotWrite
from core.models import load_model, save_model
from tests.tiny import TOKENIZER, Cut, contents, cut_after, model


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
                                                   "model.safetensors", "state-000002.pt", "state.pt"]
    other = model(seed=2)
    fresh, untouched = torch.optim.AdamW(other.parameters()), {k: v.clone() for k, v in other.state_dict().items()}
    state = manager.load(other.state_dict(), [fresh])
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert state["step"] == 3 and state["before"] == {"x": 0.5} and state["facts"] == {"val_loss": 1.5}
    assert all(torch.equal(state["model"][name], p) for name, p in net.state_dict().items())
    assert all(torch.equal(untouched[name], p) for name, p in other.state_dict().items()), "the caller loads them"
    assert load_model(str(tmp_path / "out" / "model.safetensors"))[1] == {"step": 3, "val_loss": 1.5}
    for name in ("state.pt", "state-000002.pt"):
        os.remove(tmp_path / "out" / name)
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
    assert sorted(os.listdir(tmp_path)) == ["model", "model-000002", "model-000003", "state-000002.pt",
                                            "state.pt"]
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


@pytest.mark.parametrize("count", range(14))
def test_a_run_whose_save_was_cut_anywhere_ends_with_its_last_model(tmp_path, monkeypatch, count):
    with monkeypatch.context() as patch:
        cut_after(patch, count)
        try:
            Run(tmp_path, resume=False).to_the_end()
            assert count >= 13, "eleven files are put in place and two are removed"
        except Cut:
            assert count < 13
    Run(tmp_path, resume=bool(states(str(tmp_path)))).to_the_end()
    for name, step in (("model", 3), ("model-000003", 3), ("model-000002", 2)):
        net, facts = load_model(str(tmp_path / f"{name}.safetensors"))
        assert facts == {"step": step} and all((p == step).all() for p in net.parameters())
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["step"] == 3 and all((p == 3).all() for p in state["model"].values())


def kept_states(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("state"))


def save_steps(folder, net, steps, keep_states=2):
    """A manager that has saved these steps; the weights of a step are that number."""
    manager = CheckpointManager(str(folder), lambda path, **facts: None, keep_states=keep_states)
    for step in steps:
        manager.save(step, {name: torch.full_like(p, step) for name, p in net.state_dict().items()}, [], {})
    return manager


@pytest.mark.parametrize("keep, names", [(1, ["state.pt"]), (2, ["state-000003.pt", "state.pt"]),
                                         (3, ["state-000002.pt", "state-000003.pt", "state.pt"])])
def test_the_last_states_are_kept(tmp_path, keep, names):
    save_steps(tmp_path, model(), (1, 2, 3, 4), keep)
    assert kept_states(tmp_path) == names


def damage(folder, *names):
    for name in names:
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])


def test_a_damaged_state_is_named_and_the_one_before_it_is_used(tmp_path):
    net, told = model(), []
    save_steps(tmp_path, net, (1, 2, 3), keep_states=3)
    damage(tmp_path, "state.pt", "state-000002.pt")
    manager = CheckpointManager(str(tmp_path), lambda path, **facts: None, keep_states=3)
    state = manager.load(net.state_dict(), [], told.append)
    assert state["step"] == 1 and all((p == 1).all() for p in state["model"].values())
    assert len(told) == 1 and f"{tmp_path}/state.pt is damaged or cut short" in told[0]
    assert f"going on from {tmp_path}/state-000001.pt, step 1" in told[0] and "\n" not in told[0]
    manager.save(2, net.state_dict(), [], {})
    assert kept_states(tmp_path) == ["state-000001.pt", "state.pt"], "the damaged ones are gone"
    damage(tmp_path, "state.pt")
    assert manager.load(net.state_dict(), [], told.append)["step"] == 1, "a damaged state never replaces a whole one"


def test_if_all_states_are_damaged_one_line_names_them(tmp_path):
    net = model()
    manager = save_steps(tmp_path, net, (1, 2))
    damage(tmp_path, "state.pt", "state-000001.pt")
    with pytest.raises(ValueError, match="state.pt is damaged.*state-000001.pt is damaged.*start without") as error:
        manager.load(net.state_dict(), [], pytest.fail)
    assert "\n" not in str(error.value)


def test_a_state_that_was_moved_for_the_next_is_found_without_it(tmp_path):
    net = model()
    save_steps(tmp_path, net, (1, 2))
    os.remove(tmp_path / "state.pt")
    manager = CheckpointManager(str(tmp_path), lambda path, **facts: None)
    assert manager.load(net.state_dict(), [], pytest.fail)["step"] == 1


def changed(state, **changes):
    return {key: x for key, x in (state | changes).items() if x is not None}


@pytest.mark.parametrize("change, words", [
    (lambda s: [s], "a list instead of named values"), (lambda s: changed(s, step="3"), "without a valid step"),
    (lambda s: changed(s, optimizers=None), "without a valid optimizers"), (lambda s: changed(s, model={"a": 1}), "model"),
    (lambda s: changed(s, layout=None), "without a valid layout"), (lambda s: changed(s, identity=3), "valid identity"),
    (lambda s: changed(s, model={name: p[:1] for name, p in s["model"].items()}), "not those that it lists"),
    (lambda s: changed(s, optimizers=[]), "not those that it lists"),
    (lambda s: changed(s, optimizers=[{"state": {}, "param_groups": []}]), ""),
    (lambda s: changed(s, optimizers=[7]), "")])
def test_a_file_that_torch_reads_but_that_is_no_state_is_damaged(tmp_path, change, words):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    manager = manager_of(tmp_path, net)
    manager.save(1, net.state_dict(), [optimizer], {})
    torch.save(change(torch.load(tmp_path / "state.pt", weights_only=True)), tmp_path / "state.pt")
    with pytest.raises(ValueError, match=f"state.pt is damaged or cut short .*{words}.*start without") as error:
        manager.load(net.state_dict(), [optimizer])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_and_random_changes_are_damaged_or_harmless(tmp_path, seed):
    net, rng = model(), random.Random(seed)
    manager = save_steps(tmp_path, net, (1,))
    content = bytearray((tmp_path / "state.pt").read_bytes())
    if seed % 4 == 0:
        content = rng.randbytes(rng.randrange(3000))
    for place in rng.sample(range(len(content)), min(len(content), 1 + seed % 7)) if seed % 4 else ():
        content[place] ^= 1 << rng.randrange(8)
    (tmp_path / "state.pt").write_bytes(content)
    try:
        state = manager.load(net.state_dict(), [])
    except ValueError as error:
        assert "damaged or cut short" in str(error) or "another model" in str(error), error
        assert "\n" not in str(error)
    else:
        assert all((p == 1).all() for p in state["model"].values()), "a changed weight is noticed"


def test_a_save_that_fails_names_the_last_state_and_leaves_it(tmp_path, monkeypatch):
    net = model()
    manager = save_steps(tmp_path, net, (1, 2))

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CannotWrite, match="state.pt could not be written .No space left.*last state .step 2"):
            with manager.keeping():
                manager.save(3, net.state_dict(), [], {})
    assert kept_states(tmp_path) == ["state-000001.pt", "state.pt"], "no temporary file is left"
    assert manager.load(net.state_dict(), [], pytest.fail)["step"] == 2


def test_a_damaged_state_is_removed_before_a_whole_one(tmp_path):
    net, told = model(), []
    save_steps(tmp_path, net, (1, 2, 3), keep_states=3)
    damage(tmp_path, "state.pt", "state-000002.pt")
    manager = CheckpointManager(str(tmp_path), lambda path, **facts: None, keep_states=2)
    manager.load(net.state_dict(), [], told.append)
    manager.save(2, net.state_dict(), [], {})
    assert kept_states(tmp_path) == ["state-000001.pt", "state.pt"]
    manager.save(3, net.state_dict(), [], {})
    assert kept_states(tmp_path) == ["state-000002.pt", "state.pt"]


def test_after_bad_steps_the_state_before_the_last_is_named_too(tmp_path):
    manager = save_steps(tmp_path, model(), (1, 2, 3), keep_states=3)
    assert manager.how_to_go_on(good=True) == (
        f"go on with resume=True from {tmp_path}/state.pt, the last good state (step 3); if it fails again, delete that "
        f"one, and the run goes on from {tmp_path}/state-000002.pt")
    assert manager.how_to_go_on() == f"go on with resume=True from {tmp_path}/state.pt, the last state (step 3)"


def test_without_a_state_the_way_to_go_on_is_to_start_again(tmp_path):
    assert "start again" in CheckpointManager(str(tmp_path), None).how_to_go_on()


def test_an_optimizer_keeps_the_settings_of_its_run_and_its_state_must_be_named(tmp_path):
    net, weights = torch.nn.Linear(2, 3), {"w": torch.zeros(3, 2)}
    manager = CheckpointManager(str(tmp_path), lambda path, **facts: None)
    manager.save(1, weights, [torch.optim.AdamW(net.parameters(), weight_decay=0.5)], {})
    mine = torch.optim.AdamW(net.parameters(), weight_decay=0.1)
    manager.load(weights, [mine])
    assert mine.param_groups[0]["weight_decay"] == 0.1
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    state["optimizers"][0]["state"][0] = []
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="state.pt is damaged .*the state of an optimizer lacks a part"):
        manager.load(weights, [mine])


def test_a_state_can_stay_in_its_file_until_it_is_read_also_one_that_was_compressed(tmp_path):
    save_steps(tmp_path, model(), (1,))
    with (zipfile.ZipFile(tmp_path / "state.pt") as old,
          zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as new):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    plain = read_state(tmp_path / "state.pt")["model"]
    for path in ("state.pt", "small.pt"):
        mapped = read_state(tmp_path / path, mapped=True)["model"]
        assert all(torch.equal(x, mapped[name]) for name, x in plain.items()) and len(plain) > 2
