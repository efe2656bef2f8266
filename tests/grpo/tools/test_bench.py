"""The benchmarks as a user runs them: a table and one JSON object."""

import json

import pytest

from grpo.tools import bench
from tests.grpo.benchmarks.sides import ARGUMENTS
from tests.tiny import run_here, run_script


@pytest.mark.slow
@pytest.mark.parametrize("kind, start", [("fill", run_script), ("causal", run_here), ("checkpoint", run_here),
                                         ("vocabulary", run_here)])
def test_the_benchmark_prints_a_table_and_one_json_object(kind, start):
    done = start("grpo/tools/bench.py", kind, *ARGUMENTS)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().split("\n")[-1])
    keys = {"time_ratio", "time_ratio_without_judge", "memory_ratio", "gradient_difference"}
    assert set(result) == (keys if kind == "fill" else keys - {"time_ratio_without_judge"})
    assert result["gradient_difference"] < 1e-5
    assert kind not in ("causal", "vocabulary") or "tokens per second" in done.stdout


@pytest.mark.parametrize("argv", [[], ["speed"], ["fill", "--layers=3"], ["peer", "--layers=3"],
                                  ["growth", "--layers=3"]])
def test_a_benchmark_that_cannot_be_is_refused(argv):
    with pytest.raises(ValueError, match="bench.py fill|unknown key layers"):
        bench.main(argv)


def test_one_side_reports_its_peak_memory_and_nothing_else(capsys):
    bench.main(["fill", "--side=shared", *ARGUMENTS])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"megabytes"} and found["megabytes"] > 1
