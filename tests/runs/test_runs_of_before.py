"""Runs of an earlier commit resume with the numbers that this commit itself went on to; before/write.py wrote both.

The runs draw few tokens, without top_p, at temperature 1, so that one which another processor's rounding turns into
another token is very unlikely; numbers are compared as tests/golden/golden.py does on other machines.
"""

import dataclasses
import json
import re
import shutil

import pytest
import torch

from core.config import load_config
from core.errors import Mistake, UsageError
from core.files import CONFIG, METRICS, STATE
from core.settings.other_names import with_settings_of_today
from core.supervised.config import PretrainConfig
from grpo.grpo_config import GRPOConfig
from tests.golden.golden import ELSEWHERE, differences
from tests.runs.before.write import HERE, RUNS, metrics_of
from tests.tiny import all_settings, read_records, run_here

pytestmark = pytest.mark.usefixtures("without_pictures")
WITHIN = ("within", "judge", "passes")  # saved between optimizer steps that share rollouts


@pytest.fixture
def before(tmp_path, monkeypatch):
    """A copy of the runs, in the working directory: their paths are relative."""
    shutil.copytree(HERE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_earlier_commit_resumes_with_the_numbers_of_that_commit(before, name):
    steps, whole, (script, *_) = RUNS[name]
    if script.startswith("grpo"):
        buffer, = torch.load(before / name / STATE, weights_only=True)["buffers"]
        assert bool(buffer["queue"]) == (name in WITHIN)
    expected = read_records(before / name / METRICS) + read_records(before / f"{name}-expected.jsonl")
    done = run_here(script, "--resume=True", f"--out_dir={name}", f"--max_iters={whole}")
    assert done.returncode == 0, done.stderr
    found = metrics_of(name)
    assert len(found) == len(expected) and found[-1]["step"] == whole > steps
    known = [{key: record[key] for key in old} for record, old in zip(found, expected, strict=True)]  # others are newer
    assert differences(expected, known, ELSEWHERE) == []


@pytest.mark.parametrize("name", [name for name in RUNS if name != "passes"])  # the settings of "passes" stayed
@pytest.mark.parametrize("with_file", [False, True])
def test_a_resumed_run_tells_once_which_settings_left_and_no_change_that_is_none(before, name, with_file):
    steps, whole, (script, *command) = RUNS[name]
    arguments = [argument for argument in command if "reward_normalisation" not in argument]
    left = len(arguments) < len(command)
    if with_file:
        (before / "today.py").write_text("advantage = 'gdpo'\n" * left)
        arguments.insert(0, "today.py")
    else:
        arguments = []
    for i, last in enumerate((steps + 1, steps + 2)):
        done = run_here(script, *arguments, "--resume=True", f"--out_dir={name}", f"--max_iters={last}")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.split("\n")
        told = [line for line in lines if "reward_normalisation" in line]
        assert len(told) == (left and i == 0) and all(f"{name}/{CONFIG}" in x and "'gdpo'" in x for x in told)
        changes, = (line for line in lines if f"max_iters {steps + i} -> {last}" in line)
        assert {*re.findall(r"\w+", changes)} & all_settings(GRPOConfig, PretrainConfig) == {"max_iters"}


SAVED = [  # (settings in config.json, those of today)
    ({"reward_normalisation": "none"}, {"advantage": None}),
    ({"reward_normalisation": "none", "advantage": "leave_one_out"}, {"advantage": "leave_one_out"}),
    ({"reward_normalisation": "group"}, {"advantage": "gdpo"}),
    ({"reward_normalisation": "group", "advantage": None}, {"advantage": "gdpo"}),
    ({"reward_normalisation": "group", "advantage": "batch_std", "seed": 3}, {"advantage": "gdpo", "seed": 3}),
    ({"template": "math"}, {"template": "math"}),
    ({}, {"template": "plain"}),  # although that of task_type="math" is another one today
]


@pytest.mark.parametrize("saved, today", SAVED, ids=str)
@pytest.mark.parametrize("resume", ["True", "auto"])
def test_settings_of_an_earlier_version_mean_what_they_meant(tmp_path, saved, today, resume):
    before = {"task_type": "math", "reward_functions": ["math_answer", "math_format"], "seed": 2}
    (tmp_path / CONFIG).write_text(json.dumps(before | saved))
    config, origin = load_config(GRPOConfig, [f"--resume={resume}", f"--out_dir={tmp_path}"])
    expected = {"seed": 2, "advantage": None, "template": "plain"} | today
    assert {key: getattr(config, key) for key in expected} == expected
    assert all(origin[key] == str(tmp_path / CONFIG) for key in today.keys() & origin.keys())


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_mean", "step", ["gdpo"], 1])
def test_settings_that_nothing_means_today_are_refused_with_the_file(tmp_path, advantage):
    saved = {"reward_normalisation": "group", "advantage": advantage}
    with pytest.raises(Mistake, match=rf"{CONFIG}.*reward_normalisation='group'.*advantage="):
        with_settings_of_today(saved, CONFIG)
    assert saved == {"reward_normalisation": "group", "advantage": advantage}


@pytest.mark.parametrize("value", ["batch", None, ["group"], {}, True, 1])
def test_a_value_that_a_setting_never_had_is_an_unknown_key_of_its_file(tmp_path, value):
    (tmp_path / CONFIG).write_text(json.dumps({"reward_normalisation": value}))
    with pytest.raises(UsageError, match=rf"{CONFIG}.*reward_normalisation"):
        load_config(GRPOConfig, ["--resume=True", f"--out_dir={tmp_path}"])


@pytest.mark.parametrize("name", RUNS)
def test_each_setting_of_a_run_is_read_as_it_was(before, name):
    """Settings that came since, and those of features that were off, have their defaults."""
    cls = GRPOConfig if RUNS[name][2][0].startswith("grpo") else PretrainConfig
    expected = json.loads((before / name / CONFIG).read_text())
    del expected["starts"]
    if expected.pop("reward_normalisation", "none") == "group":
        expected["advantage"] = "gdpo"
    config, _ = load_config(cls, ["--resume=True", f"--out_dir={name}"])
    found = json.loads(json.dumps(dataclasses.asdict(config)))
    assert {key: found[key] for key in expected} == expected | {"resume": True}
