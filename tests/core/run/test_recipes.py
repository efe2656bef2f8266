"""Missing files are built by their recipes, files that are there are left alone."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from core.run.recipes import (
    TORCHRUN_VARIABLES,
    build_missing,
    build_missing_checkpoint,
    build_missing_dataset,
    one_run_at_a_time,
)


def recipe(folder, body):
    path = folder / "recipe.py"
    path.write_text(f"import json, os, sys\n{body}\n")
    return str(path)


def test_a_missing_file_is_built_and_one_that_is_there_is_not(tmp_path):
    target, told = tmp_path / "made", []
    script = recipe(tmp_path, f"open({str(target)!r}, 'a').write('built')")
    for _ in range(2):
        build_missing(str(target), script, "some_key", [script], told.append)
    assert target.read_text() == "built" and len(told) == 1
    assert "some_key" in told[0] and str(target) in told[0] and script in told[0]


def test_runs_that_need_the_same_file_at_the_same_time_build_it_once(tmp_path):
    target = tmp_path / "made"
    script = recipe(tmp_path, f"import time; open({str(target)!r} + '.log', 'a').write('x'); time.sleep(1); "
                              f"open({str(target)!r}, 'w').write('done')")
    told = []
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(build_missing, str(target), f"{script} --quick", "dataset", [script], told.append)
    assert target.read_text() == "done" and (tmp_path / "made.log").read_text() == "x"
    assert sorted(line.split("; ")[1][:7] for line in told) == ["buildin", "waiting", "waiting"]


def test_a_build_that_outlives_its_run_is_waited_for(tmp_path):
    script = recipe(tmp_path, "print('x', flush=True); sys.stdin.read()")
    with one_run_at_a_time(script, pytest.fail) as held:
        process = subprocess.Popen([sys.executable, script], pass_fds=held, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE)
        process.stdout.readline()
    told = []

    def waiting():
        told.append(process.poll())
        process.communicate()

    with one_run_at_a_time(script, waiting):
        assert told == [None] and process.poll() == 0


def test_nothing_is_built_without_a_recipe_or_a_path(tmp_path):
    build_missing(str(tmp_path / "made"), None, "key", ["no command"], pytest.fail)
    build_missing(str(tmp_path / "made"), "", "key", ["no command"], pytest.fail)
    build_missing(None, "recipe", "key", ["no command"], pytest.fail)
    build_missing_checkpoint(None, "recipe", "key", "dataset", pytest.fail)
    assert not os.listdir(tmp_path)


def test_a_recipe_that_fails_ends_the_run_with_its_name(tmp_path):
    script = recipe(tmp_path, "sys.exit(3)")
    with pytest.raises(ValueError, match="generator_checkpoint: building .*made with .*recipe.py failed"):
        build_missing(str(tmp_path / "made"), script, "generator_checkpoint", [script], lambda text: None)


def test_a_recipe_runs_alone_even_if_this_process_is_a_rank(tmp_path, monkeypatch):
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OTHER", "kept")
    script = recipe(tmp_path, "out = sys.argv[1].removeprefix('--out=')\nos.mkdir(out)\n"
                              "json.dump(dict(os.environ), open(os.path.join(out, 'meta.json'), 'w'))")
    build_missing_dataset(str(tmp_path / "d"), script, lambda text: None)
    text = (tmp_path / "d" / "meta.json").read_text()
    assert '"OTHER": "kept"' in text and not any(f'"{name}"' in text for name in TORCHRUN_VARIABLES)


def test_a_recipe_of_a_dataset_may_have_arguments(tmp_path):
    script = recipe(tmp_path, "json.dump(sys.argv[1:], open(os.path.join(os.path.dirname(__file__), 'meta.json'), 'w'))")
    build_missing_dataset(str(tmp_path), f"{script} --tokenizer=bert --source=python", lambda text: None)
    assert (tmp_path / "meta.json").read_text() == f'["--tokenizer=bert", "--source=python", "--out={tmp_path}"]'
    build_missing_dataset(str(tmp_path / "none"), None, pytest.fail)


def test_a_checkpoint_is_trained_in_a_folder_beside_it_and_resumed_there(tmp_path, monkeypatch):
    commands, path = [], tmp_path / "g.safetensors"

    class Finished:
        returncode = 0

    def run(command, env, pass_fds):
        commands.append(command)
        path.touch()
        return Finished

    monkeypatch.setattr("core.run.recipes.subprocess.run", run)
    build_missing_checkpoint(str(path), "config.py", "key", "mine", lambda text: None)
    assert commands[0][0] == sys.executable and commands[0][1].endswith(os.path.join("core", "pretrain.py"))
    assert commands[0][2:] == ["config.py", "--dataset=mine", f"--out_dir={tmp_path}/g-run", f"--export={path}",
                               "--resume=auto"]


def test_a_recipe_that_was_stopped_before_it_wrote_its_file_ends_the_run(tmp_path):
    script = recipe(tmp_path, "sys.exit(0)")
    with pytest.raises(ValueError, match="building .*made with .* failed or was stopped, see above; start again to go"):
        build_missing(str(tmp_path / "made"), script, "generator_checkpoint", [script], lambda text: None)
