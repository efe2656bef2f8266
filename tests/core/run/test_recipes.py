"""Missing files are built by their recipes, files that are there are left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.run.recipes import RECIPES, build_missing, build_missing_checkpoint, build_missing_dataset
from core.settings.user_code import ROOT


def recipe(folder, body):
    path = folder / "prepare.py"
    path.write_text(f"import json, os, sys\n{body}\n")
    return str(path)


def test_nothing_is_built_without_a_recipe_or_a_path_or_again(tmp_path):
    (tmp_path / "there").touch()
    assert not build_missing(tmp_path / "there", "recipe", "key", ["no command"], pytest.fail)
    for path in (None, str(tmp_path / "mistyped.safetensors")):
        assert not build_missing_checkpoint(path, "key", "dataset", pytest.fail)
    assert not build_missing_dataset(str(tmp_path / "none"), pytest.fail)
    assert os.listdir(tmp_path) == ["there"]


def test_a_missing_file_is_built_with_a_line_about_it(tmp_path):
    target, said = tmp_path / "made", []
    script = recipe(tmp_path, f"open({str(target)!r}, 'w').write('done')")
    build_missing(str(target), script, "some_key", [script], said.append)
    assert target.read_text() == "done"
    assert len(said) == 1 and said[0].startswith(f"some_key: {target} is missing; building it with {script}")


@pytest.mark.parametrize("code", [3, 0])
def test_a_recipe_that_fails_or_writes_no_file_ends_the_run_with_its_name(tmp_path, code):
    script = recipe(tmp_path, f"sys.exit({code})")
    with pytest.raises(ValueError, match="generator_checkpoint: building .*made with .*prepare.py failed or was stopped, "
                                         "see above; start again to go on"):
        build_missing(str(tmp_path / "made"), script, "generator_checkpoint", [script], lambda text: None)


def test_a_dataset_is_built_by_its_prepare_even_if_this_process_is_a_rank(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "OTHER": "1"}.items():
        monkeypatch.setenv(name, value)
    recipe(tmp_path, f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'meta.json')!r}, 'w'))")
    assert build_missing_dataset(str(tmp_path), lambda text: None, dry=True) and not (tmp_path / "meta.json").exists()
    assert not build_missing_dataset(str(tmp_path), lambda text: None)
    arguments, environment = json.loads((tmp_path / "meta.json").read_text())
    assert arguments == [f"--out={tmp_path}"]
    assert environment["OTHER"] == environment["WORLD_SIZE"] == "1"


def test_a_checkpoint_is_trained_in_a_folder_beside_it_and_resumed_there(tmp_path, monkeypatch):
    commands, path = [], "out-trunk/model.safetensors"

    def run(command, env):
        commands.append(command)
        Path(path).touch()
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("core.run.recipes.subprocess.run", run)
    for folder in ("config", "out-trunk"):
        (tmp_path / folder).mkdir()
    (tmp_path / RECIPES[path]).touch()
    monkeypatch.chdir(tmp_path)
    build_missing_checkpoint(path, "key", "mine", lambda text: None)
    assert commands[0][0] == sys.executable and commands[0][1].endswith(os.path.join("core", "pretrain.py"))
    assert commands[0][2:] == ["config/pretrain_trunk.py", "--dataset=mine", "--out_dir=out-trunk/model-run", f"--export={path}",
                               "--resume=auto"]


def test_recipes_are_shipped_configs():
    assert all(os.path.exists(os.path.join(ROOT, recipe)) for recipe in RECIPES.values())
