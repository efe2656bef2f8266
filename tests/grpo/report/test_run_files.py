"""The files of a run, read to be shown."""

import pytest

from grpo.report import run_files
from grpo.report.run_files import Run, names_of
from tests.tiny import jsonl


def test_a_run_is_its_metrics_and_its_latest_start_without_a_line_that_was_cut_short(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/x": 0.5}\n{"step": 2, "loss": null}\n{"step": 3, "lo')
    run = Run(tmp_path, "mine")
    assert (run.last, run.samples, run.config, run.start, run.end) == (2, {}, {}, {}, {})
    assert run.curves["eval/x"] == [(0, 0.5)] and run.curves["loss"] == [(2, None)]
    first, later = {"step": 0, "end": {"ended": "failed"}}, {"step": 40}
    jsonl(tmp_path / "config.json", {"seed": 3, "starts": [first, later]})
    run = Run(tmp_path, "mine")
    assert (run.config, run.start, run.end) == ({"seed": 3}, {"step": 40}, {})


@pytest.mark.parametrize("content", [None, b"", b'{"step": 1'])
def test_a_folder_without_metrics_is_no_run(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(FileNotFoundError, match="metrics.jsonl holds no metrics; name the out_dir of a run"):
        Run(tmp_path, "mine")


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": \xff}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2 is not JSON"):
        Run(tmp_path, "mine")


def test_of_a_long_run_all_evaluations_and_the_last_step_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "STEPS", 10)
    jsonl(tmp_path / "metrics.jsonl", *({"step": i, "loss" if i % 9 else "eval/x": float(i)} for i in range(95)))
    run = Run(tmp_path, "mine")
    assert [step for step, _ in run.curves["eval/x"]] == list(range(0, 95, 9))
    steps = [step for step, _ in run.curves["loss"]]
    assert run.last == steps[-1] == 94 and len(steps) <= 10 and {b - a for a, b in zip(steps, steps[1:])} <= {10, 20}


@pytest.mark.parametrize("folders, names", [
    (["/x/out/"], ["out"]), (["/x/a", "/y/b"], ["a", "b"]), (["/home/al/out", "/tmp/out"], ["~/out", "/tmp/out"])])
def test_a_run_has_the_name_of_its_folder_or_its_path_where_another_has_that_name(folders, names, monkeypatch):
    monkeypatch.setenv("HOME", "/home/al")
    assert names_of(folders) == names
