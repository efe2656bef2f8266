"""How a run starts and ends: what is built, what is recorded, what a start that fails leaves alone."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import torch

from core import start
from core.distributed import Distributed
from core.models import save_model
from core.run import SET_ASIDE, STAYING
from grpo.report import page
from tests.tiny import CAUSAL, ROOT, causal_model, config, one_process, run_here, write_prompt_dataset

TRAIN = "grpo/train_grpo.py"
REWARDS = """
import os
import signal
from grpo.rewards import reward

metrics = {metrics!r}


@reward(0, 1)
def troubled(prompts, completions, **columns):
    if os.path.exists(metrics) and {logged!r} in open(metrics).read():
        {trouble}
    return [float(text.count("1") > 0) for text in completions]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    write_prompt_dataset(folder / "sums")
    save_model(str(folder / "g.safetensors"), causal_model(scale=3.0), CAUSAL)
    return {"dataset": folder / "sums", "generator_checkpoint": folder / "g.safetensors", "task_type": "general",
            "max_new_tokens": 5, "batch_size": 2, "group_size": 2, "max_iters": 3, "eval_problems": 4, "device": "cpu",
            "log_interval": 1, "sample_interval": 3, "save_interval": 1, "lr_decay_iters": 3, "kl_beta": 0.0}


@pytest.fixture
def launch(monkeypatch, base, tmp_path):
    """Runs the command in this process, in the folder `out`, and checks its exit code. No picture is drawn."""
    monkeypatch.setattr(page, "draw_curves", lambda runs, path: open(path, "w").close())

    def launched(code=0, **changes):
        settings = base | {"out_dir": tmp_path / "out"} | changes
        done = run_here(TRAIN, *(f"--{key}={value}" for key, value in settings.items()))
        assert done.returncode == code, done.stdout + done.stderr
        return done
    return launched


def trouble(tmp_path, trouble, logged='"loss"'):
    """Settings of a run in `out` whose reward makes trouble once metrics.jsonl has this text: after the first step."""
    text = REWARDS.format(metrics=str(tmp_path / "out" / "metrics.jsonl"), logged=logged, trouble=trouble)
    (tmp_path / "rewards.py").write_text(text)
    return {"reward_file": tmp_path / "rewards.py", "reward_functions": "('troubled',)"}


def everything(folder):
    """{path: bytes} of all files in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def starts(folder):
    return json.loads((folder / "config.json").read_text())["starts"]


@pytest.mark.parametrize("logged, step", [("", 0), ('"loss"', 1)])
def test_a_run_that_fails_records_when_and_why(launch, tmp_path, logged, step):
    done, out = launch(1, **trouble(tmp_path, "raise KeyError('no such thing')", logged)), tmp_path / "out"
    end = starts(out)[-1]["end"]
    assert (end["ended"], end["step"]) == ("failed", step)
    console = (out / "console.log").read_text()
    assert all("no such thing" in text for text in (done.stderr, end["why"], console)) and "Traceback" in console


def test_a_run_that_a_signal_stops_records_it_and_goes_on(launch, tmp_path):
    settings, out = trouble(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)"), tmp_path / "out"
    launch(**settings)
    end = starts(out)[-1]["end"]
    assert (end["ended"], end["why"]) == ("stopped", "SIGTERM") and 0 < end["step"] < 3
    trouble(tmp_path, "pass")
    shown = launch(**settings, resume=True).stdout
    assert f"{tmp_path}/out/state.pt, step {end['step']} of 3" in shown
    assert [r["end"]["ended"] for r in starts(out)] == ["stopped", "finished"]
    assert (out / "console.log").read_text().endswith(shown), "the console goes on where it was"


def test_a_resumed_run_says_which_settings_have_changed(launch, tmp_path):
    launch(max_iters=2)
    launch(1, resume=True, optimizer="muon")
    assert "max_iters 2 -> 3" in launch(resume="auto", max_iters=3).stdout
    assert [r["step"] for r in starts(tmp_path / "out")] == [0, 2] and not (tmp_path / "out" / "previous").exists()


def test_a_start_records_its_command_settings_and_machine(launch, tmp_path):
    launch(seed=7, max_iters=1)
    start, = starts(tmp_path / "out")
    assert start["settings"]["seed"] == {"value": 7, "default": 1337, "set in": "command line"}
    assert "--seed=7" in start["command"] and start["torch"] == torch.__version__
    assert (start["device"], start["precision"], start["ranks"]) == ("cpu", "float32", 1)


def test_a_start_that_is_refused_leaves_a_finished_run_as_it_was(launch, tmp_path, monkeypatch):
    launch(max_iters=1)
    before = everything(tmp_path / "out")
    monkeypatch.setitem(sys.modules, "ray", None)  # it cannot be imported
    for settings, word in (({"sampler": "ray"}, "pip install"), ({"report_to": "('nobody',)"}, "report_to"),
                           ({"generator_checkpoint": "gone.safetensors"}, "gone.safetensors")):
        for more in ({}, {"dry_run": True}, {"resume": "auto"}):
            assert word in launch(1, **settings, **more).stderr
            assert everything(tmp_path / "out") == before


def test_whatever_a_run_writes_is_set_aside_by_the_next_and_other_files_stay(launch, tmp_path):
    """A name that core/files.py lacks would stay beside the next run, or make the folder one of the user's. A start
    that fails after its beginning has a folder of its own."""
    pytest.importorskip("tensorboard")
    out = tmp_path / "out"
    launch(report_to="tensorboard")
    first = {path: content for path, content in everything(out).items() if path not in STAYING}
    (out / "notes.txt").write_text("mine")
    failing = trouble(tmp_path, "if len(prompts) == 4: raise KeyError('no record, but a completion')", logged="")
    for number in (1, 2):
        assert f"{out}/previous/{number}\n" in launch(1, **failing, seed=number).stdout
    assert everything(out / "previous" / "1") == first and len(first) > 8
    assert json.loads((out / "previous" / "2" / "config.json").read_text())["seed"] == 1
    assert (out / "notes.txt").read_text() == "mine"
    assert all(SET_ASIDE.fullmatch(name) or name in STAYING for name in set(os.listdir(out)) - {"notes.txt"})


ELSEWHERE = ("electra", "gsm8k", "math")  # of these, no prepare.py builds the data set
CONFIGS = sorted(path.name for path in pathlib.Path(ROOT, "config").glob("grpo_*.py")
                 if path.stem.removeprefix("grpo_") not in ELSEWHERE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder with the files of the repository that git has, and nothing else."""
    folder = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "config", "data"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no repository")
    for name in listed.stdout.split("\n")[:-1]:
        os.makedirs((folder / name).parent, exist_ok=True)
        shutil.copy(os.path.join(ROOT, name), folder / name)
    return folder


@pytest.mark.parametrize("config", CONFIGS)
def test_a_dry_run_in_a_fresh_clone_says_what_would_be_built(clone, monkeypatch, config):
    monkeypatch.chdir(clone)
    monkeypatch.setattr(start.subprocess, "run", lambda *arguments, **settings: pytest.fail("it builds"))
    before = everything(clone)
    done = run_here(TRAIN, f"config/{config}", "--dry_run=True")
    assert done.returncode == 0 and done.stderr == ""
    name = re.search('^dataset = "(.*?)"', (clone / "config" / config).read_text(), re.M)[1]
    assert f"data/{name}/prepare.py\n" in done.stdout and everything(clone) == before


def recipe(folder, body):
    """A prepare.py in the folder. Returns the config of a run on this dataset."""
    (folder / "prepare.py").write_text(f"import json, os, sys\n{body}\n")
    return config(dataset=str(folder), generator_checkpoint="g.safetensors")


def test_a_dataset_is_built_by_its_prepare_py_even_if_this_process_is_a_rank(tmp_path, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "OTHER": "1"}.items():
        monkeypatch.setenv(name, value)
    c = recipe(tmp_path, f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'meta.json')!r}, 'w'))")
    monkeypatch.setattr(Distributed, "meet", lambda self: setattr(self, "world", 1))
    assert not start.build_missing(c, ("generator_checkpoint",), one_process())
    arguments, environment = json.loads((tmp_path / "meta.json").read_text())
    assert arguments == [f"--out={tmp_path}"] and environment["OTHER"] == environment["WORLD_SIZE"] == "1"


@pytest.mark.parametrize("code", [3, 0])
def test_a_prepare_py_that_fails_or_writes_no_file_ends_the_run(tmp_path, code):
    with pytest.raises(ValueError, match="^dataset: .*meta.json .*prepare.py"):
        start.build_missing(recipe(tmp_path, f"sys.exit({code})"), (), one_process())


def test_an_earlier_run_is_not_moved_before_every_rank_has_read_its_checkpoints(launch, tmp_path, monkeypatch):
    """The generator of a run may be the model of an earlier run in out_dir."""
    launch(max_iters=1)
    moved, read = [], []
    set_aside, broadcast = start.set_aside, Distributed.barrier
    monkeypatch.setattr(Distributed, "barrier", lambda self: (read.append(list(moved)), broadcast(self))[1])
    monkeypatch.setattr(start, "set_aside", lambda folder: moved.append(len(read)) or set_aside(folder))
    launch(max_iters=1)
    assert moved[0] >= 3 and not any(read[: moved[0]]), "a barrier comes first, after the models were read"


@pytest.mark.parametrize("error", [
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")])
def test_out_of_memory_is_one_line_with_what_lowers_it_and_the_run_goes_on_later(launch, tmp_path, monkeypatch, error):
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def full(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return clip(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", full)
        line = launch(1).stderr
    assert line.count("\n") == 1 and {"batch_size=2,", "group_size=2,", "max_new_tokens=5,"} <= set(line.split())
    end = starts(tmp_path / "out")[-1]["end"]
    assert (end["ended"], end["step"]) == ("failed", 1)
    launch(resume=True)
    assert starts(tmp_path / "out")[-1]["end"]["step"] == 3
