"""How a run starts and ends: what is built, what is recorded, what a start that fails leaves alone."""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from core.models import save_model
from core.run import SET_ASIDE, STAYING
from grpo.losses import KL_ESTIMATORS, OBJECTIVES
from grpo.report import page
from tests.families import model_folder
from tests.tiny import CAUSAL, ROOT, Cut, causal_model, cut_after, read_records, run_here, write_prompt_dataset

OF_A_START = "config.json", "console.log", "report.html", "lock"  # a start that fails adds to these
TRAIN, PRETRAIN = "grpo/train_grpo.py", "core/pretrain.py"
REWARDS = """
import os, signal
from grpo.rewards import reward

metrics = {metrics!r}


@reward(0, 1)
def troubled(prompts, completions, **columns):
    if '"loss"' in open(metrics).read():
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
    """Runs the command in this process, in the folder `out`, and checks its exit code. No picture is drawn.
    files: config files; code: None for any"""
    monkeypatch.setattr(page, "draw_curves", lambda runs, path: open(path, "w").close())

    def launched(code=0, files=(), **changes):
        settings = base | {"out_dir": tmp_path / "out"} | changes
        done = run_here(TRAIN, *files, *(f"--{key}={value}" for key, value in settings.items()))
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done
    return launched


def trouble(tmp_path, trouble, name="out"):
    """Settings of a run in the folder `name` whose reward makes trouble after the first step."""
    text = REWARDS.format(metrics=str(tmp_path / name / "metrics.jsonl"), trouble=trouble)
    (tmp_path / "rewards.py").write_text(text)
    return {"reward_file": tmp_path / "rewards.py", "reward_functions": "('troubled',)"}


def everything(folder):
    """{path: bytes} of all files in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def starts(folder):
    return json.loads((folder / "config.json").read_text())["starts"]


def test_a_start_records_versions_the_size_of_the_model_and_its_seconds(launch, tmp_path):
    began = time.perf_counter()
    launch(max_iters=1)
    start, = starts(tmp_path / "out")
    assert 0 <= start["end"]["seconds"] <= time.perf_counter() - began + 0.05  # rounded to a tenth
    assert (start["torch"], start["numpy"]) == (torch.__version__, np.__version__)
    millions = causal_model(scale=3.0).num_parameters() / 1e6
    assert start["parameters"] == f"{millions:.4g} M"


@pytest.mark.parametrize("resume", [False, "auto"])
@pytest.mark.parametrize("count", range(3))  # files that were put in place
def test_a_run_that_was_killed_while_it_wrote_its_first_files_starts_again(
        launch, monkeypatch, tmp_path, count, resume):
    with monkeypatch.context() as patch, pytest.raises(Cut):
        cut_after(patch, count)
        launch()
    before = set(os.listdir(tmp_path / "out"))
    launch(resume=resume)
    assert starts(tmp_path / "out")[-1]["end"]["ended"] == "finished"
    assert before - {"lock"} <= set(os.listdir(tmp_path / "out" / "previous" / "1"))


@pytest.mark.parametrize(("name", "text", "words"), [
    ("metrics.jsonl", '{"loss": 1.0}\n', "line 1 step delete"),
    ("metrics.jsonl", '{"step": "2"}\n', "line 1 step delete"),
    ("samples.jsonl", '{"step": null}\n', "line 1 step delete"), ("config.json", '{"starts": 5}', "starts delete"),
    ("config.json", '{"starts": [5]}', "starts delete")])
def test_a_damaged_file_of_a_run_ends_its_resume_in_one_line_and_nothing_is_lost(launch, tmp_path, name, text, words):
    launch(max_iters=1)
    (tmp_path / "out" / name).write_text(text)
    before = everything(tmp_path / "out")
    line, = launch(1, resume=True, max_iters=2).stderr.splitlines()
    assert all(word in line for word in (name, *words.split()))
    after = everything(tmp_path / "out")
    assert {path: after[path] for path in before if path not in OF_A_START} == {
        path: content for path, content in before.items() if path not in OF_A_START}
    (tmp_path / "out" / name).unlink()
    launch(resume=True, max_iters=2)


PROMPTS = ["Write a function to calculate fibonacci numbers:", "Explain how binary search works:",
           *(f"Count down from {n}:" for n in range(3, 11))]


@pytest.mark.parametrize("count", [2, 10])
def test_two_to_ten_prompts_alone_train_and_are_evaluated_on_and_said_to_be(launch, tmp_path, count):
    (tmp_path / "my.json").write_text(json.dumps({"prompts": PROMPTS[:count]}))
    done = launch(dataset=tmp_path / "my.json", reward_functions="length_penalty", batch_size=12, max_iters=2,
                  reward_settings="{'length_min':0,'length_max':9}", eval_interval=1,
                  stop_sequences="('a','e','o','1','2','3')")
    shown = done.stdout.splitlines()
    assert sum(f"{count} records: " in line and '"split"' in line for line in shown) == 1, "both splits are the same"
    assert sum("12 problems" in line and f"{count} training" in line for line in shown) == 1, "some more than once"
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    assert [record["step"] for record in records if record.get("grad_norm", 0) > 0] == [1, 2]
    assert [record["step"] for record in records if "eval/reward/length_penalty" in record] == [0, 1, 2]
    read = {record["problem"] for record in read_records(tmp_path / "out" / "samples.jsonl")}
    assert read and read <= set(PROMPTS[:count])


def test_a_run_that_fails_records_when_and_why(launch, tmp_path):
    done, out = launch(1, **trouble(tmp_path, "raise KeyError('no such thing')")), tmp_path / "out"
    end = starts(out)[-1]["end"]
    assert (end["ended"], end["step"]) == ("failed", 1)
    console = (out / "console.log").read_text()
    assert all("no such thing" in text for text in (done.stderr, end["why"], console)) and "Traceback" in console


def test_a_run_that_a_signal_stops_records_it_and_goes_on(launch, tmp_path):
    settings, out = trouble(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)"), tmp_path / "out"
    settings |= {"ppo_epochs": 3, "max_iters": 6, "sample_interval": 6}
    launch(**settings)
    end = starts(out)[-1]["end"]
    assert (end["ended"], end["why"]) == ("stopped", "SIGTERM") and end["step"] == 4
    trouble(tmp_path, "pass")
    before = everything(out)
    checked = launch(**settings, resume=True, doctor=True, code=None).stdout
    assert everything(out) == before
    shown = launch(**settings, resume=True).stdout
    line, = re.findall(f"{tmp_path}/out/state.pt, step 4 of 6(.*)", shown)
    for text in (line, re.search("(?m)^buffer.*", checked)[0]):
        held = {name: int(count) for count, name in re.findall(r"(\d+) (rollouts|minibatches|evaluations)", text)}
        assert held == {"rollouts": 2, "minibatches": 2, "evaluations": 1}
    assert [r["end"]["ended"] for r in starts(out)] == ["stopped", "finished"]
    assert (out / "console.log").read_text().endswith(shown), "the console goes on where it was"


OWN_OBJECTIVE = """
from grpo.losses import KL_ESTIMATORS, OBJECTIVES
OBJECTIVES["mine"] = OBJECTIVES["grpo"]
KL_ESTIMATORS["mine"] = lambda logp, ref_logp: (ref_logp - logp).square()
objective = kl_estimator = "mine"
"""


def run_command_in(text, *more):
    """Runs the command with which a text says that a run resumes, and more arguments."""
    command = re.search("python .*--resume=True.*", text)[0]
    _, script, *arguments = shlex.split(command)
    return run_here(script, *arguments, *more)


@pytest.fixture
def own_objective(tmp_path):
    """A config file with an objective and a KL estimator of its own, which another process does not know."""
    (tmp_path / "own.py").write_text(OWN_OBJECTIVE)
    yield tmp_path / "own.py"
    forget_own()


def forget_own():
    for table in (OBJECTIVES, KL_ESTIMATORS):
        table.pop("mine", None)


@pytest.mark.parametrize("own", [False, True], ids=["settings", "rows of its own"])
def test_the_command_that_a_stopped_run_prints_resumes_it(launch, tmp_path, own_objective, own):
    out = tmp_path / "it's out"
    settings = trouble(tmp_path, "os.kill(os.getpid(), signal.SIGTERM)", out.name)
    shown = launch(files=[own_objective] * own, out_dir=out, seed=7, **settings, kl_beta=0.1).stdout
    forget_own()
    trouble(tmp_path, "pass", out.name)
    done = run_command_in(shown)
    assert done.returncode == 0, done.stderr
    first, last = starts(out)
    assert (first["end"]["ended"], last["end"]["ended"], last["end"]["step"]) == ("stopped", "finished", 3)
    assert first["end"]["step"] == last["step"] > 0
    assert json.loads((out / "config.json").read_text())["seed"] == 7


def test_an_earlier_run_that_failed_starts_set_aside_is_named_with_the_command_that_resumes_it(launch, tmp_path):
    out = tmp_path / "out"
    launch(max_iters=1)
    failing = trouble(tmp_path, "raise KeyError('no such thing')") | {"save_interval": 3}
    for _ in range(2):  # the second one sets the first aside, from which nothing resumes
        launch(1, **failing)
        line = launch(1, resume=True).stderr
        assert line.count("\n") == 1 and f"{out}/previous/1" in line and f"{out}/previous/2" not in line
        assert run_here(TRAIN, "--resume=True", f"--out_dir={out}").stderr == line
    assert (out / "previous" / "2").exists()
    done = run_command_in(line, "--max_iters=2")
    assert done.returncode == 0, done.stderr
    last = starts(out / "previous" / "1")[-1]
    assert (last["step"], last["end"]["step"]) == (1, 2) and not (out / "state.pt").exists()


LEARN = {"block_size": 32, "n_layer": 1, "n_embd": 16, "n_head": 2, "batch_size": 2, "eval_batches": 1}


@pytest.mark.parametrize("script, folder", [(TRAIN, "out-grpo"), (PRETRAIN, "out-pretrain")])
def test_a_script_resumes_in_its_default_folder_and_says_what_has_changed(launch, base, dataset, tmp_path, monkeypatch,
                                                                          script, folder):
    monkeypatch.chdir(tmp_path)
    settings = base if script == TRAIN else LEARN | {"dataset": dataset, "device": "cpu"}
    first = [f"--{key}={value}" for key, value in (settings | {"max_iters": 1}).items()]
    told = []
    for arguments in (first, ["--resume=True", "--max_iters=2"], ["--resume"]):
        done = run_here(script, *arguments)
        assert done.returncode == 0, done.stderr
        told.append(re.findall(r".*max_iters\D+1\D+2\b.*\n", done.stdout))
    assert list(map(len, told)) == [0, 1, 0]
    assert told[1][0] in (tmp_path / folder / "console.log").read_text() and "batch_size" not in told[1][0]
    assert [start["end"]["step"] for start in starts(tmp_path / folder)] == [1, 2, 2]


def test_a_state_without_its_settings_resumes_with_those_of_the_command_and_is_named_without(launch, tmp_path):
    launch(max_iters=1)
    os.remove(tmp_path / "out" / "config.json")
    done = run_here(TRAIN, "--resume=True", f"--out_dir={tmp_path}/out", "--max_iters=2")
    assert done.returncode == 1 and f"{tmp_path}/out" in done.stderr and "--out_dir" in done.stderr
    launch(resume=True, max_iters=2)
    assert starts(tmp_path / "out")[-1]["end"]["step"] == 2


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
    """A name that core/files.py lacks would stay beside the next run, or make the folder one of the user's."""
    pytest.importorskip("tensorboard")
    out = tmp_path / "out"
    launch(report_to="tensorboard")
    first = {path: content for path, content in everything(out).items() if path not in STAYING}
    (out / "notes.txt").write_text("mine")
    assert f"{out}/previous/1\n" in launch().stdout
    assert everything(out / "previous" / "1") == first and len(first) > 8
    assert (out / "notes.txt").read_text() == "mine"
    assert all(SET_ASIDE.fullmatch(name) or name in STAYING for name in set(os.listdir(out)) - {"notes.txt"})


def weights(folder):
    return torch.load(folder / "state.pt", weights_only=True)["model"]


BRIEF, BRIEFER = {"system_prompt": "Be brief."}, {"system_prompt": "Be brief, please."}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["alone", "with a config file", "auto", "auto, with a config file"])
@pytest.mark.parametrize("first, later, kept", [
    ({"template": "plain"}, {}, {"template": "plain", "system_prompt": None}),  # as before tasks had templates
    ({"template": "plain"}, {"template": None}, {"template": "plain", "system_prompt": None}),
    ({}, {}, {"template": "math", "system_prompt": None}),
    ({"template": "chat"} | BRIEF, BRIEF, {"template": "chat"} | BRIEF),
    (BRIEF, BRIEF, {"template": "math"} | BRIEF)], ids=str)
def test_a_resumed_run_keeps_its_template_bit_for_bit(launch, tmp_path, first, later, kept, how):
    save_model(str(tmp_path / "g.safetensors"), causal_model(scale=3.0, block_size=256), CAUSAL)
    common = {"generator_checkpoint": tmp_path / "g.safetensors", "task_type": "math", "max_iters": 2,
              "entropy_bonus": 0.1}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    launch(out_dir=whole, **common | first)
    launch(out_dir=cut, **common | first | {"max_iters": 1})
    last = {"out_dir": cut, "max_iters": 2, "resume": "auto" if "auto" in how else True}
    if "file" in how:
        (tmp_path / "none.py").write_text("")
        launch(files=[tmp_path / "none.py"], **common | later | last)
    else:
        done = run_here(TRAIN, *(f"--{key}={value}" for key, value in last.items()))
        assert done.returncode == 0, done.stderr
    for folder in (whole, cut):
        config = json.loads((folder / "config.json").read_text())
        assert {key: config[key] for key in kept} == kept
    assert starts(cut)[-1]["step"] == 1
    assert all(record["grad_norm"] > 0 for record in read_records(whole / "metrics.jsonl") if "loss" in record)
    assert all(torch.equal(x, weights(cut)[name]) for name, x in weights(whole).items())


@pytest.mark.slow
@pytest.mark.parametrize("first, later, template", [
    ({}, {}, "model_math"), (BRIEF, BRIEF, "model_math"), (BRIEF, BRIEFER, "model_math"),
    ({"template": "model"} | BRIEF, BRIEF, "model"), ({"template": "plain"}, BRIEF, "plain"),
    ({}, {"template": "chat"}, "chat")], ids=str)
def test_a_resumed_run_of_a_chat_model_keeps_the_template_of_its_task(launch, tmp_path, first, later, template):
    pytest.importorskip("transformers")
    common = {"generator_checkpoint": model_folder(tmp_path / "chat", "qwen3", longest=256), "task_type": "math"}
    (tmp_path / "none.py").write_text("")
    launch(files=[tmp_path / "none.py"], **common | first | {"max_iters": 1})
    launch(files=[tmp_path / "none.py"], **common | later | {"max_iters": 1, "resume": True})
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["template"], config["system_prompt"]) == (template, later.get("system_prompt"))


ELSEWHERE = ("gsm8k", "math")  # of these, no prepare.py builds the data set
CONFIGS = sorted(path.name for path in pathlib.Path(ROOT, "config").glob("grpo_*.py")
                 if path.stem.removeprefix("grpo_") not in ELSEWHERE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder with the files of the repository that git has, and nothing else."""
    folder = tmp_path_factory.mktemp("clone")
    if subprocess.run(["git", "-C", ROOT, "checkout-index", "-a", f"--prefix={folder}/"]).returncode:
        pytest.skip("no repository")
    return folder


@pytest.mark.parametrize("config", CONFIGS)
def test_a_dry_run_in_a_fresh_clone_says_what_would_be_built(clone, monkeypatch, config):
    monkeypatch.chdir(clone)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **settings: pytest.fail("it builds"))
    before = everything(clone)
    done = run_here(TRAIN, f"config/{config}", "--dry_run=True")
    assert done.returncode == 0 and done.stderr == ""
    name = re.search('^dataset = "(.*?)"', (clone / "config" / config).read_text(), re.M)[1]
    assert f"data/{name}/prepare.py\n" in done.stdout and everything(clone) == before


def test_out_of_memory_is_one_line_with_what_lowers_it_and_the_run_goes_on_later(launch, tmp_path, monkeypatch):
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def full(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return clip(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", full)
        line = launch(1).stderr
    assert line.count("\n") == 1 and {"batch_size=2,", "group_size=2,", "max_new_tokens=5,"} <= set(line.split())
    end = starts(tmp_path / "out")[-1]["end"]
    assert (end["ended"], end["step"]) == ("failed", 1)
    launch(resume=True)
    assert starts(tmp_path / "out")[-1]["end"]["step"] == 3
