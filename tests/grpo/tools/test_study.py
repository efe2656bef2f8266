"""The command that compares settings over seeds."""

import itertools
import json
import os
import subprocess

import pytest

from core.config import load_config
from grpo.grpo_config import GRPOConfig
from grpo.tools import study
from tests.tiny import judge, model, save


@pytest.mark.slow
def test_a_study_runs_what_is_missing_and_prints_a_row_for_each(dataset, tmp_path, monkeypatch, capsys):
    generator = save(tmp_path / "generator.safetensors", model(scale=1.0))
    scorer = save(tmp_path / "judge.safetensors", judge())
    (tmp_path / "c.py").write_text(f"dataset = {dataset!r}\ngenerator_checkpoint = {generator!r}\nblock_size = 32\n"
                                   f"judge_checkpoint = {scorer!r}\nbatch_size = 4\neval_interval = 2\n"
                                   "eval_problems = 4\neval_completions = 2\ndevice = 'cpu'\n")
    tiny = study.Study(str(tmp_path / "c.py"), "objective", study.values("objective", ("grpo", "gspo")), "entropy", 0.0,
                       ("--max_iters=4",))
    monkeypatch.setitem(study.STUDIES, "tiny", tiny)
    for _ in range(2):
        study.main(["tiny", "--seeds=1", "--jobs=2", f"--out={tmp_path}", "--minibatches=2"])
        out = capsys.readouterr()
        rows = [line for line in out.out.split("\n") if line.startswith(("| grpo", "| gspo"))]
        assert len(rows) == 2 and all("(1/1)" in row and row.count("|") == 8 for row in rows)
    assert "done" not in out.err, "the second time everything was there"
    assert sorted(os.listdir(tmp_path / "tiny")) == ["grpo-1", "gspo-1"]


def test_a_run_that_was_killed_does_not_pass_for_the_one_that_was_there_before(tmp_path, monkeypatch):
    compared = study.Study("config/grpo_example.py", "objective", {"x": ()}, "entropy", 0.0, ())

    def train(command, **options):
        (tmp_path / "x-1").mkdir(exist_ok=True)
        (tmp_path / "x-1" / "metrics.jsonl").write_text(json.dumps({"step": 1, "made with": command[-1]}) + "\n")
        return subprocess.CompletedProcess(command, int("--killed" in command), "", "killed")

    monkeypatch.setattr(study.subprocess, "run", train)
    study.run(compared, "x", 1, str(tmp_path), None, ("--first",))
    with pytest.raises(ValueError, match="killed"):
        study.run(compared, "x", 1, str(tmp_path), None, ("--second", "--killed"))
    assert study.run(compared, "x", 1, str(tmp_path), None, ("--first",))[0]["made with"] == "--first"


@pytest.mark.parametrize("argv", [["nothing"], [], ["fill_in", "--help"], ["fill_in", "--seeds=many"],
                                  ["fill_in", "--seeds=0"],
                                  ["fill_in", "--jobs=0"]])
def test_a_study_that_cannot_be_is_refused(argv):
    with pytest.raises(ValueError, match="study.py|seeds|jobs"):
        study.main(argv)


@pytest.mark.parametrize("name", study.STUDIES)
def test_the_settings_of_a_study_are_settings_of_its_runs(name):
    chosen = study.STUDIES[name]
    configs = [load_config(GRPOConfig, [chosen.config, *chosen.settings, *choice])[0]
               for choice in chosen.choices.values()]
    assert all(a != b for a, b in itertools.combinations(configs, 2)) and len(configs) > 1
    named = [", ".join(str(getattr(config, key)) for key in chosen.heading.split(", ")) for config in configs]
    assert named == list(chosen.choices)


def test_a_run_is_finished_if_it_ended_with_the_same_arguments(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    assert study.finished(str(tmp_path), ["a"]) is None, "it did not end"
    (tmp_path / "arguments.json").write_text(json.dumps(["a"]))
    assert study.finished(str(tmp_path), ["a"]) == [{"step": 1, "loss": 0.5}]
    assert study.finished(str(tmp_path), ["b"]) is None


def test_a_setting_that_no_run_would_take_is_refused_before_the_first_run(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "run", lambda *_: pytest.fail("a run was started"))
    with pytest.raises(ValueError, match="unknown key bogus"):
        study.main(["arithmetic", "--bogus=1", f"--out={tmp_path}"])


def test_a_metric_at_a_time_lies_between_the_evaluations():
    records = [{"step": 0, "eval/x": 1.0}, {"step": 1, "time/train": 2.0, "time/collect": 1.0},
               {"step": 2, "time/train": 3.0}, {"step": 2, "eval/x": 3.0}]
    evaluations = [records[0], records[3]]
    assert study.seconds(records, 1) == 3.0 and study.seconds(records, 2) == 6.0
    assert study.at(evaluations, records, "eval/x", 3.0) == 2.0
    assert study.at(evaluations, records, "eval/x", 60.0) == 3.0


def test_a_row_holds_means_and_deviations_over_seeds():
    compared = study.Study("c.py", "objective", study.values("objective", ("grpo",)), "x", 0.5, ())
    runs = [[{"step": 0, "eval/x": 0.1}, {"step": 5, "time/train": 2.0}, {"step": 5, "eval/x": last, "eval/kl": kl}]
            for last, kl in ((0.4, 0.2), (0.6, 0.4))]
    assert study.summary(compared, runs, 1.0) == (
        "0.100 | 0.500 ± 0.141 | 0.300 ± 0.071 | 5 (1/2) | 0.300 | 2")
