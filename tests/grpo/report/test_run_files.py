"""The files of a run, read to be shown."""

import pytest

from grpo.report import run_files
from grpo.report.run_files import Run, names_of, smooth, stretches, thin
from tests.tiny import jsonl


def test_a_run_is_what_its_files_hold(tmp_path):
    jsonl(tmp_path / "metrics.jsonl", {"step": 0, "eval/x": 0.5}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": None})
    jsonl(tmp_path / "samples.jsonl", {"step": 0, "best": "a"}, {"step": 0, "best": "b"}, {"step": 2, "best": "c"})
    jsonl(tmp_path / "starts.jsonl", {"step": 0}, {"step": 40, "time": "resumed"})
    (tmp_path / "config.json").write_text('{"seed": 3}')
    run = Run(tmp_path, "mine")
    assert (run.name, run.last, run.config) == ("mine", 2, {"seed": 3})
    assert run.start == {"step": 40, "time": "resumed"}
    assert run.curves["eval/x"] == [(0, 0.5)] and run.curves["loss"] == [(1, 2.0), (2, None)]
    assert {step: [r["best"] for r in records] for step, records in run.samples.items()} == {0: ["a", "b"], 2: ["c"]}


def test_metrics_alone_are_a_run_and_a_line_that_was_cut_short_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    run = Run(tmp_path, "mine")
    assert (run.name, run.last, run.samples, run.config, run.start) == ("mine", 1, {}, {}, {})


@pytest.mark.parametrize("text", [None, "", '{"step": 1'])
def test_a_folder_without_metrics_is_no_run(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(FileNotFoundError, match="metrics.jsonl holds no metrics; name the out_dir of a run"):
        Run(tmp_path, "mine")


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": \xff}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2 is damaged"):
        Run(tmp_path, "mine")


def test_of_a_long_run_all_evaluations_and_the_last_step_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "STEPS", 10)
    records = [{"step": i, "loss": float(i)} if i % 9 else {"step": i, "eval/x": float(i)} for i in range(95)]
    jsonl(tmp_path / "metrics.jsonl", *records)
    run = Run(tmp_path, "mine")
    assert [step for step, _ in run.curves["eval/x"]] == list(range(0, 95, 9))
    steps = [step for step, _ in run.curves["loss"]]
    assert run.last == steps[-1] == 94 and len(steps) <= 10 and {b - a for a, b in zip(steps, steps[1:])} <= {10, 20}


def test_of_many_samples_the_first_and_the_latest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "SETS", 4)
    jsonl(tmp_path / "metrics.jsonl", {"step": 90})
    jsonl(tmp_path / "samples.jsonl", *({"step": step, "best": best} for step in range(0, 91, 10) for best in "ab"))
    run = Run(tmp_path, "mine")
    assert {step: [record["best"] for record in records] for step, records in run.samples.items()} == {
        0: ["a", "b"], 70: ["a", "b"], 80: ["a", "b"], 90: ["a", "b"]}


@pytest.mark.parametrize("folders, names", [
    (["x/out"], ["out"]), (["a/out", "b/out"], ["a/out", "b/out"]), (["a/out", "b/out", "c"], ["a/out", "b/out", "c"]),
    (["x/a/out/", "y/a/out", "y/b/out"], ["x/a/out", "y/a/out", "b/out"]), (["a", "a"], ["a", "a"]),
    (["/home/al/out", "/tmp/out", "/home/al"], ["~/out", "tmp/out", "~"])])
def test_a_name_is_the_shortest_end_of_a_path_that_no_other_run_has(folders, names, monkeypatch):
    monkeypatch.setenv("HOME", "/home/al")
    assert names_of(folders) == names


def test_times_are_means_and_a_phase_that_a_step_does_not_have_counts_as_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "MEANS", 2)
    steps = [{"step": 1, "time/train": 1.0, "time/collect": 4.0}, {"step": 2, "time/train": 3.0},
             {"step": 3, "time/train": 2.0, "time/collect": 2.0}, {"step": 4, "time/train": 4.0}]
    jsonl(tmp_path / "metrics.jsonl", {"step": 0, "eval/x": 1.0}, *steps)
    assert Run(tmp_path, "mine").times() == {"train": [(2, 2.0), (4, 3.0)], "collect": [(2, 2.0), (4, 1.0)]}


@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 7, 100])
def test_stretches_are_at_most_so_many_and_together_the_list(length):
    parts = stretches(list(range(length)), 3)
    assert len(parts) <= 3 and sum(parts, []) == list(range(length)) and all(parts)
    assert len({len(part) for part in parts[1:]}) <= 1


def test_a_thinned_curve_keeps_jumps_of_a_single_step_and_its_order():
    points = [(step, float(step % 7)) for step in range(5000)]
    points[1234], points[4321], points[777] = (1234, 99.0), (4321, -99.0), (777, None)
    kept = thin(points)
    assert {points[1234], points[4321], points[777], points[-1]} <= set(kept) <= set(points)
    assert len(kept) <= run_files.POINTS + 1 and kept[-1][1] not in (0.0, 6.0), "the last is neither lowest nor highest"
    assert kept == sorted(kept, key=lambda point: point[0])
    assert thin(points[:50]) == points[:50]


def test_a_smoothed_curve_holds_the_means_of_what_is_finite():
    points = [(step, float(step)) for step in range(1, 2 * run_files.MEANS + 1)]
    points[0], points[2], points[3] = (1, None), (3, None), (4, None)
    assert smooth(points)[:3] == [(2, 2.0), (4, None), (6, 5.5)] and len(smooth(points)) == run_files.MEANS
    assert smooth(points[:2]) == points[:2]
