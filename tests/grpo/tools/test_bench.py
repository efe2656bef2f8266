"""The benchmarks as a user runs them: a table and one JSON object."""

import json

import pytest

from grpo.tools import bench
from tests.grpo.benchmarks.sides import ARGUMENTS
from tests.tiny import run_script

KEYS = {"time_ratio", "memory_ratio", "gradient_difference"}


@pytest.mark.parametrize("kind", ["causal", "checkpoint", "vocabulary"])
def test_a_comparison_prints_a_table_and_one_json_object(kind, monkeypatch, capsys):
    if kind == "vocabulary":
        pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "peak_of_process", lambda argv, side: 300.0 if side == "naive" else 100.0)
    bench.main([kind, *ARGUMENTS, "--vocab_size=500"])
    out = capsys.readouterr().out
    result = json.loads(out.strip().split("\n")[-1])
    assert set(result) == KEYS and result["memory_ratio"] == 3.0 and result["gradient_difference"] < 1e-5
    assert kind == "checkpoint" or "tokens per second" in out


@pytest.mark.slow
def test_the_peaks_are_those_of_processes_that_run_one_side():
    done = run_script("grpo/tools/bench.py", "fill", *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().split("\n")[-1])
    assert set(result) == KEYS | {"time_ratio_without_judge"} and result["gradient_difference"] < 1e-5


@pytest.mark.parametrize("argv", [[], ["speed"], ["fill", "--layers=3"], ["peer", "--layers=3"],
                                  ["growth", "--layers=3"]])
def test_a_benchmark_that_cannot_be_is_refused(argv):
    with pytest.raises(ValueError, match="bench.py fill|unknown key layers"):
        bench.main(argv)


def test_one_side_reports_its_peak_memory_and_nothing_else(capsys):
    bench.main(["fill", "--side=shared", *ARGUMENTS])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"megabytes"} and found["megabytes"] > 1
