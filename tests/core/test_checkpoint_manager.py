"""Files: whole or not at all, safe to load, and clear about what is wrong with them."""

import os
import pathlib

import pytest
import torch

from core import checkpoint_manager
from core.checkpoint_manager import CheckpointManager, freeze, load_model, load_tokenizer, save_model, set_aside
from core.model import MASKED_FILL, SEQUENCE_SCORER
from core.tokenizer import CharTokenizer
from tests.tiny import TOKENIZER, judge, model, save


def manager_of(folder, net, keep=0):
    return CheckpointManager(str(folder), lambda path, **facts: save_model(path, net, TOKENIZER, **facts), keep)


def test_a_model_file_is_all_that_is_needed_to_use_the_model(tmp_path):
    net, tokens = model(), torch.randint(0, 96, (2, 9))
    path = str(tmp_path / "deep" / "m.safetensors")
    save_model(path, net, TOKENIZER, step=7)
    loaded, facts = load_model(path, mode=MASKED_FILL, tokenizer=TOKENIZER)
    assert torch.equal(net(tokens), loaded(tokens)) and facts == {"step": 7} and not loaded.training
    assert load_tokenizer(path).description() == TOKENIZER.description()
    save_model(path, net, TOKENIZER, torch.float16)
    half, _ = load_model(path)
    assert next(half.parameters()).dtype == torch.float32
    torch.testing.assert_close(half(tokens), net(tokens), rtol=0.05, atol=0.05)
    assert os.listdir(tmp_path / "deep") == ["m.safetensors"]


def test_a_wrong_file_is_named_with_what_was_found(tmp_path):
    generator, scorer = save(tmp_path / "g.safetensors", model()), save(tmp_path / "j.safetensors", judge())
    with pytest.raises(ValueError, match=f"judge_checkpoint={generator} has mode masked_fill, but sequence_scorer"):
        load_model(generator, mode=SEQUENCE_SCORER, key="judge_checkpoint")
    with pytest.raises(ValueError, match="has another vocabulary"):
        load_model(scorer, tokenizer=CharTokenizer("abc"))
    with pytest.raises(FileNotFoundError, match="generator_checkpoint=nowhere"):
        load_model("nowhere", key="generator_checkpoint")
    with pytest.raises(ValueError, match="is a folder; name the file in it"):
        load_model(str(tmp_path))
    whole = open(generator, "rb").read()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="cut is damaged or cut short"):
            load_model(str(tmp_path / "cut"))
    from safetensors.torch import save_file
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="not one that this project wrote"):
        load_model(str(tmp_path / "foreign"))


def test_a_frozen_model_has_no_gradients_and_no_dropout():
    net = freeze(model(dropout=0.5).train())
    assert not net.training and not any(p.requires_grad for p in net.parameters())


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


def test_the_last_models_are_kept_beyond_a_million_steps(tmp_path):
    net = model()
    manager = manager_of(tmp_path, net, keep=2)
    for step in (999998, 999999, 1000000):
        manager.save(step, net.state_dict(), [], {})
    assert manager.numbered() == ["model-999999.safetensors", "model-1000000.safetensors"]


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
