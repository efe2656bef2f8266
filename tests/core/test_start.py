"""What is recorded when a run starts, and missing files that are built."""

import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.settings.user_code import ROOT
from core.start import RECIPES, Recorded, build, build_checkpoint, build_dataset
from tests.tiny import config, one_process


def recorded(folder, origin=(), step=0, dist=None, **settings):
    """A run in a folder that has begun, and what it has said."""
    said = []
    trainer = SimpleNamespace(step=step, stopped_by=None, logger=SimpleNamespace(say=said.append),
                              checkpoints=SimpleNamespace(last=("state.pt", step)))
    run = Recorded(config(out_dir=str(folder), **settings), dict(origin), dist or one_process(), trainer, step > 0)
    run.__enter__()
    return run, said


def saved(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_start_has_its_command_settings_machine_and_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--dataset=my data"])
    origin = {"seed": "command line", "learning_rate": "config/a.py", "top_k": "config/a.py"}
    run, _ = recorded(tmp_path, origin, seed=7, learning_rate=0.5, min_lr=0.1, max_iters=3)
    start, = saved(tmp_path)["starts"]
    assert start["command"] == "python x.py '--dataset=my data'" and "end" not in start
    assert start["settings"] == {"seed": {"value": 7, "default": 1337, "set in": "command line"},
                                 "learning_rate": {"value": 0.5, "default": 1e-5, "set in": "config/a.py"}}
    assert start["torch"] == importlib.metadata.version("torch")
    assert (start["device"], start["precision"], start["ranks"]) == ("cpu", "float32", 1)
    run.trainer.step = 2
    run.end(None)
    assert saved(tmp_path)["starts"][0]["end"]["ended"] == "stopped" and saved(tmp_path)["seed"] == 7


def test_the_record_names_neither_the_user_nor_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home" / "alice"))
    inside = str(tmp_path / "home" / "alice" / "data" / "x.jsonl")
    monkeypatch.setattr(sys, "argv", ["train.py", f"--dataset={inside}"])
    recorded(tmp_path, {"dataset": inside}, dataset=inside)
    start, = saved(tmp_path)["starts"]
    assert start["command"].endswith("--dataset=~/data/x.jsonl")
    assert start["settings"]["dataset"]["value"] == start["settings"]["dataset"]["set in"] == "~/data/x.jsonl"
    assert "alice" not in str(start) and socket.gethostname() not in str(start)


def test_an_earlier_run_is_not_moved_before_every_rank_has_read_its_checkpoints(tmp_path):
    """The generator of a run may be the model of an earlier run in out_dir."""
    class Waiting(type(one_process())):
        barrier = lambda self: seen.append(os.listdir(tmp_path))

    seen = []
    (tmp_path / "model.safetensors").touch()
    _, said = recorded(tmp_path, dist=Waiting("cpu", "float32"), max_iters=1)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "previous"] and seen == [["model.safetensors"]]
    assert f"which is now in {tmp_path}/previous/1" in said[0]


def recipe(folder, body):
    path = folder / "prepare.py"
    path.write_text(f"import json, os, sys\n{body}\n")
    return str(path)


@pytest.mark.parametrize("code", [3, 0])
def test_a_recipe_that_fails_or_writes_no_file_ends_the_run_with_its_name(tmp_path, code):
    script = recipe(tmp_path, f"sys.exit({code})")
    with pytest.raises(ValueError, match="generator_checkpoint: building .*made with .*prepare.py failed or was stopped, "
                                         "see above; start again to go on"):
        build(str(tmp_path / "made"), script, "generator_checkpoint", [script])


def test_a_dataset_is_built_by_its_prepare_even_if_this_process_is_a_rank(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "OTHER": "1"}.items():
        monkeypatch.setenv(name, value)
    recipe(tmp_path, f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'meta.json')!r}, 'w'))")
    assert build_dataset(str(tmp_path), dry=True) and not (tmp_path / "meta.json").exists()
    assert not build_dataset(str(tmp_path))
    arguments, environment = json.loads((tmp_path / "meta.json").read_text())
    assert arguments == [f"--out={tmp_path}"]
    assert environment["OTHER"] == environment["WORLD_SIZE"] == "1"


def test_a_checkpoint_is_trained_in_a_folder_beside_it_and_resumed_there(tmp_path, monkeypatch):
    commands, path = [], "out-trunk/model.safetensors"

    def run(command, env):
        commands.append(command)
        Path(path).touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("core.start.subprocess.run", run)
    for folder in ("config", "out-trunk"):
        (tmp_path / folder).mkdir()
    (tmp_path / RECIPES[path]).touch()
    monkeypatch.chdir(tmp_path)
    build_checkpoint(path, "key", "mine")
    assert commands[0][0] == sys.executable and commands[0][1].endswith(os.path.join("core", "pretrain.py"))
    assert commands[0][2:] == ["config/pretrain_trunk.py", "--dataset=mine", "--out_dir=out-trunk/model-run", f"--export={path}",
                               "--resume=auto"]


def test_recipes_are_shipped_configs():
    assert all(os.path.exists(os.path.join(ROOT, recipe)) for recipe in RECIPES.values())
