"""How a run starts and ends: what happens to its folder, and what it leaves there that says so."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from core.files.json_lines import read_records
from core.models import save_model
from core.run import recipes
from core.run.names import STAYING, is_set_aside
from core.settings import optional
from core.settings.script import exit_code
from grpo import train_grpo
from grpo.report import plots
from tests.tiny import CAUSAL, ROOT, causal_model, model, save, write_prompt_dataset

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


def trouble(tmp_path, trouble, logged='"loss"'):
    """Settings of a run in `out` whose reward makes trouble once metrics.jsonl has this text: after the first step."""
    text = REWARDS.format(metrics=str(tmp_path / "out" / "metrics.jsonl"), logged=logged, trouble=trouble)
    (tmp_path / "rewards.py").write_text(text)
    return {"reward_file": tmp_path / "rewards.py", "reward_functions": "('troubled',)"}


@pytest.fixture
def launch(monkeypatch, capsys, base, tmp_path):
    """The command in this process, in the folder `out`: (exit code, stdout, stderr). No picture is drawn."""
    monkeypatch.setattr(plots, "draw_curves", lambda runs, path: open(path, "w").close())

    def launched(*argv, **changes):
        capsys.readouterr()
        settings = base | {"out_dir": tmp_path / "out"} | changes
        monkeypatch.setattr(sys, "argv", [TRAIN, *argv, *(f"--{key}={value}" for key, value in settings.items())])
        return exit_code(train_grpo.main), *capsys.readouterr()
    return launched


def everything(folder):
    """{path: bytes} of all files in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def starts(folder):
    return read_records(folder / "starts.jsonl")


def head(folder):
    """The paragraph of report.html that says how the run ended."""
    return re.search('<p class="status">(.*)</p>', (folder / "report.html").read_text())[1]


def test_a_finished_run_says_so_and_its_console_is_kept(launch, tmp_path):
    code, out, err = launch()
    assert code == 0, err
    start, end = starts(tmp_path / "out")
    assert start["step"] == 0 and "ended" not in start
    assert (end["ended"], end["step"]) == ("finished", 3) and "why" not in end
    assert head(tmp_path / "out") == f"finished at step 3, {end['time']}"
    assert (tmp_path / "out" / "console.log").read_text() == out


@pytest.mark.parametrize("logged, step", [("", 0), ('"loss"', 1)])
def test_a_run_that_fails_says_when_and_why(launch, tmp_path, logged, step):
    code, _, err = launch(**trouble(tmp_path, "raise KeyError('no such thing')", logged))
    assert code == 1
    assert "no such thing" in err
    end = starts(tmp_path / "out")[-1]
    assert (end["ended"], end["step"]) == ("failed", step) and "no such thing" in end["why"]
    console = (tmp_path / "out" / "console.log").read_text()
    assert f"failed at step {step}: " in console and "no such thing" in console and "Traceback" in console
    if step:
        assert head(tmp_path / "out").startswith(f"failed at step {step}, ") and "no such thing" in head(tmp_path / "out")


def test_a_run_that_a_signal_stops_says_so_and_goes_on(launch, tmp_path):
    settings = trouble(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)")
    code, _, err = launch(**settings)
    assert code == 0, err
    end = starts(tmp_path / "out")[-1]
    assert (end["ended"], end["why"]) == ("stopped", "SIGTERM") and 0 < end["step"] < 3
    assert head(tmp_path / "out") == f"stopped at step {end['step']}, {end['time']}: SIGTERM"
    trouble(tmp_path, "pass")
    code, out, err = launch(**settings, resume=True)
    assert code == 0, err
    assert f"going on from {tmp_path}/out/state.pt, step {end['step']} of 3\n" in out
    assert "properly" not in out and [r.get("ended") for r in starts(tmp_path / "out")] == [
        None, "stopped", None, "finished"]
    assert (tmp_path / "out" / "console.log").read_text().endswith(out), "the console goes on where it was"


@pytest.mark.slow
def test_a_run_that_was_killed_is_told_by_the_next_start(base, launch, tmp_path):
    settings = base | trouble(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)") | {"out_dir": tmp_path / "out"}
    done = subprocess.run([sys.executable, TRAIN, *(f"--{key}={value}" for key, value in settings.items())], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert head(tmp_path / "out").startswith("running, or not ended properly: at step ")
    code, out, err = launch(resume="auto")
    assert code == 0, err
    assert "the process before this one did not end properly: it was killed, or the machine stopped" in out


def test_a_resumed_run_says_from_where_it_goes_on_and_what_has_changed(launch, tmp_path):
    assert launch(max_iters=2)[0] == 0
    code, out, err = launch(resume=True, max_iters=3, temperature=0.5, seed=5, batch_size=4)
    assert code == 0, err
    line = next(line for line in out.split("\n") if line.startswith("going on from"))
    assert line.startswith(f"going on from {tmp_path}/out/state.pt, step 2 of 3; changed since: ")
    assert sorted(line.partition("since: ")[2].split(", ")) == ["batch_size 2 -> 4", "max_iters 2 -> 3",
                                                                "seed 1337 -> 5", "temperature 0.8 -> 0.5"]
    code, out, err = launch(resume=True, max_iters=3, temperature=0.5, seed=5, batch_size=4)
    assert code == 0, err
    assert "step 3 of 3\n" in out
    assert "the run was finished, and there is nothing to do; to train on, set max_iters above 3" in out


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_a_start_that_is_refused_leaves_a_finished_run_as_it_was_and_a_dry_run_says_the_same(launch, tmp_path,
                                                                                             monkeypatch):
    assert launch()[0] == 0
    before = everything(tmp_path / "out")
    real, url = optional.importlib.import_module, f"http://127.0.0.1:{free_port()}"

    def without_ray(name, *arguments):
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return real(name, *arguments)

    monkeypatch.setattr(optional.importlib, "import_module", without_ray)
    for settings, message in (({"sampler": "ray"}, "sampler='ray' needs the package ray: pip install"),
                              ({"sampler": "vllm", "vllm_url": url, "top_p": 1.0}, f"vllm_url={url} cannot be reached"),
                              ({"report_to": "('nobody',)"}, "there is no tracker 'nobody'"),
                              ({"generator_checkpoint": "gone.safetensors"}, "gone.safetensors does not exist")):
        found = [launch(**settings, **more) for more in ({}, {"dry_run": True}, {"resume": "auto"})]
        assert [code for code, _, _ in found] == [1, 1, 1]
        assert message in found[0][2] and len(found[0][2].strip().split("\n")) == 1
        assert found[0][2] == found[1][2] == found[2][2]
        assert everything(tmp_path / "out") == before


@pytest.mark.parametrize("more", [{}, {"dry_run": True}])
def test_a_folder_of_the_user_is_refused_and_unchanged(launch, tmp_path, more):
    (tmp_path / "home").mkdir()
    for name in ("README.md", ".bashrc", "train.bin"):
        (tmp_path / "home" / name).write_text(name)
    before = everything(tmp_path / "home")
    code, _, err = launch(out_dir=tmp_path / "home", **more)
    assert code == 1 and "home holds .bashrc, which is of no run; name a new or an empty folder" in err
    assert everything(tmp_path / "home") == before


def test_whatever_a_run_writes_is_set_aside_by_the_next_and_other_files_stay(launch, tmp_path):
    """A name that core/run/names.py lacks would stay beside the next run, or make the folder one of the user's."""
    pytest.importorskip("tensorboard")
    settings = {"report_to": "('tensorboard',)", "keep_checkpoints": 2}
    assert launch(**settings)[0] == 0
    first = set(os.listdir(tmp_path / "out"))
    (tmp_path / "out" / "notes.txt").write_text("mine")
    code, out, err = launch(**settings, max_iters=1)
    assert code == 0, err
    assert f"held an earlier run, which is now in {tmp_path}/out/previous/1\n" in out
    assert "previous/1" in (tmp_path / "out" / "console.log").read_text()
    moved = set(os.listdir(tmp_path / "out" / "previous" / "1"))
    assert moved == first - set(STAYING) and len(moved) > 10
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    left = set(os.listdir(tmp_path / "out")) - {"notes.txt"}
    assert all(is_set_aside(name) or name in STAYING for name in left)


CONFIGS = sorted(path.name for path in pathlib.Path(ROOT, "config").glob("grpo_*.py") if "electra" not in path.name)


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
def test_a_dry_run_in_a_fresh_clone_says_what_would_be_built_and_checks_the_rest(clone, monkeypatch, capsys, config):
    monkeypatch.chdir(clone)
    monkeypatch.setattr(recipes.subprocess, "run", lambda *arguments, **settings: pytest.fail("it builds"))
    before = everything(clone)
    monkeypatch.setattr(sys, "argv", [TRAIN, f"config/{config}", "--dry_run=True"])
    code = exit_code(train_grpo.main)
    out, err = capsys.readouterr()
    assert code == 0 and err == ""
    recipe = re.search(r'^dataset_recipe = "(.*?)"', (clone / "config" / config).read_text(), re.M)[1]
    assert f"it would be built by {recipe}\n" in out and "nothing was built or trained" in out
    assert "out_dir = " in out + "out_dir = " * (config == "grpo_example.py")
    assert "batch_size = 64" not in out and everything(clone) == before
    assert ("would be built by config/pretrain" in out) != ("\nrewards: " in out)


def test_a_dry_run_still_refuses_what_cannot_work_while_the_data_is_missing(launch, tmp_path):
    recipe = {"dataset": tmp_path / "none", "dataset_recipe": "data/custom/prepare.py", "dry_run": True}
    code, out, _ = launch(**recipe)
    assert code == 0 and "it would be built by data/custom/prepare.py" in out
    code, _, err = launch(**recipe, reward_functions="('exact',)")
    assert code == 1 and "'exact' is not one of" in err
    save(tmp_path / "fill.safetensors", model())
    code, _, err = launch(**recipe, generator_checkpoint=tmp_path / "fill.safetensors", block_size=32,
                          mask_truncated=True)
    assert code == 1 and "mask_truncated=True is for prompts" in err
    assert not (tmp_path / "out").exists()


def test_a_start_that_was_cut_short_costs_no_report(launch, tmp_path):
    assert launch(max_iters=2)[0] == 0
    with open(tmp_path / "out" / "starts.jsonl", "a") as f:
        f.write('{"time": "2026-')
    code, out, err = launch(max_iters=3, resume=True)
    assert code == 0 and "is not written" not in out, err
    assert head(tmp_path / "out").startswith("finished at step 3")
    assert json.loads((tmp_path / "out" / "starts.jsonl").read_text().split("\n")[2])["step"] == 2
