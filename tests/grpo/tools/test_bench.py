"""The benchmarks as a user runs them: a table and one JSON object."""

import json

import pytest

from grpo.tools import bench


@pytest.mark.slow
def test_a_comparison_measures_both_sides_in_processes_of_their_own_and_their_gradients_are_equal(capsys):
    bench.main(["fill", "--n_layer=1", "--n_embd=16", "--block_size=32", "--batch_size=2", "--group_size=3",
                "--device=cpu"])
    out = capsys.readouterr().out.strip().split("\n")
    rows = {line[:24].strip(): line[24:].split() for line in out}
    result = json.loads(out[-1])
    assert result.pop("gradient_difference") < 1e-5
    assert list(result) == ["time_ratio", "time_ratio_without_judge", "memory_ratio"]
    for row, ratio in zip(("seconds", "seconds, no judge", "peak MB"), result.values(), strict=True):
        naive, shared, shown = map(float, rows[row])
        assert shown == ratio == pytest.approx(naive / shared, rel=0.01, abs=0.006)


@pytest.mark.parametrize("argv", [[], ["speed"], ["fill", "--layers=3"], ["peer", "--layers=3"]])
def test_a_benchmark_that_cannot_be_is_refused(argv):
    with pytest.raises(ValueError, match="bench.py fill|unknown key layers"):
        bench.main(argv)
