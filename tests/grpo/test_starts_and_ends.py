"""How a run starts and ends: what happens to its folder, and what it leaves there that says so."""

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from core.run import SET_ASIDE, STAYING
from core.models import save_model
from core import start
from core.settings import optional
from grpo.report import page
from tests.tiny import CAUSAL, ROOT, causal_model, run_here, write_prompt_dataset

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


def head(folder):
    """The paragraph of report.html that says how the run ended."""
    return re.search('<p class="status">(.*)</p>', (folder / "report.html").read_text())[1]


@pytest.mark.parametrize("logged, step", [("", 0), ('"loss"', 1)])
def test_a_run_that_fails_says_when_and_why(launch, tmp_path, logged, step):
    done, out = launch(1, **trouble(tmp_path, "raise KeyError('no such thing')", logged)), tmp_path / "out"
    assert "no such thing" in done.stderr
    end = starts(out)[-1]["end"]
    assert (end["ended"], end["step"]) == ("failed", step) and "no such thing" in end["why"]
    console = (out / "console.log").read_text()
    assert f"failed at step {step}: " in console and "no such thing" in console and "Traceback" in console
    if step:
        assert head(out).startswith(f"failed at step {step}, ") and "no such thing" in head(out)


def test_a_run_that_a_signal_stops_says_so_and_goes_on(launch, tmp_path):
    settings, out = trouble(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)"), tmp_path / "out"
    launch(**settings)
    end = starts(out)[-1]["end"]
    assert (end["ended"], end["why"]) == ("stopped", "SIGTERM") and 0 < end["step"] < 3
    assert head(out) == f"stopped at step {end['step']}, {end['time']}: SIGTERM"
    trouble(tmp_path, "pass")
    shown = launch(**settings, resume=True).stdout
    assert f"going on from {tmp_path}/out/state.pt, step {end['step']} of 3\n" in shown
    assert [r["end"]["ended"] for r in starts(out)] == ["stopped", "finished"]
    assert (out / "console.log").read_text().endswith(shown), "the console goes on where it was"


def test_a_resumed_run_says_from_where_it_goes_on_and_what_has_changed(launch, tmp_path):
    """Its process before was killed."""
    launch(max_iters=2)
    config = tmp_path / "out" / "config.json"
    before = json.loads(config.read_text())
    del before["starts"][0]["end"]
    before = json.dumps(before)
    config.write_text(before)
    assert "config.json" in launch(1, resume=True, optimizer="muon").stderr and config.read_text() == before
    shown = launch(resume="auto", max_iters=3).stdout
    assert f"going on from {tmp_path}/out/state.pt, step 2 of 3; changed since: max_iters 2 -> 3\n" in shown
    assert [r["step"] for r in starts(tmp_path / "out")] == [0, 2]
    assert json.loads(config.read_text())["max_iters"] == 3 and not (tmp_path / "out" / "previous").exists()


def test_a_start_that_is_refused_leaves_a_finished_run_as_it_was_and_a_dry_run_says_the_same(launch, tmp_path,
                                                                                             monkeypatch):
    launch(max_iters=1)
    before = everything(tmp_path / "out")
    real = optional.importlib.import_module

    def without_ray(name, *arguments):
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *arguments)

    monkeypatch.setattr(optional.importlib, "import_module", without_ray)
    for settings, message in (({"sampler": "ray"}, "sampler='ray' needs the package ray: pip install"),
                              ({"report_to": "('nobody',)"}, "there is no tracker 'nobody'"),
                              ({"generator_checkpoint": "gone.safetensors"}, "gone.safetensors does not exist")):
        found = {launch(1, **settings, **more).stderr for more in ({}, {"dry_run": True}, {"resume": "auto"})}
        assert len(found) == 1 and message in min(found) and min(found).strip().count("\n") == 0
        assert everything(tmp_path / "out") == before


@pytest.mark.parametrize("more", [{}, {"dry_run": True}])
def test_a_folder_of_the_user_is_refused_and_unchanged(launch, tmp_path, more):
    (tmp_path / "home").mkdir()
    for name in ("README.md", ".bashrc", "train.bin"):
        (tmp_path / "home" / name).write_text(name)
    before = everything(tmp_path / "home")
    error = launch(1, out_dir=tmp_path / "home", **more).stderr
    assert "home holds .bashrc, which is of no run; name a new or an empty" in error
    assert everything(tmp_path / "home") == before


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
        shown = launch(1, **failing, seed=number).stdout
        assert f"held an earlier run, which is now in {out}/previous/{number}\n" in shown
    assert everything(out / "previous" / "1") == first and len(first) > 10
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
    assert f"it would be built by data/{name}/prepare.py\n" in done.stdout
    assert "nothing was built or trained" in done.stdout and everything(clone) == before
