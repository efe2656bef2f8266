"""The benchmarks: both sides compute the same, and the output is a table and one JSON object."""

import json

import pytest
import torch

from core import distributions
from grpo.tools import bench
from tests.tiny import run_script

SIZES = ("--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=32", "--batch_size=2", "--group_size=3",
         "--repeats=1", "--device=cpu", "--prompt_length=20", "--completion_length=4")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fill", "causal", "checkpoint", "vocabulary"])
def test_the_benchmark_prints_a_table_and_one_json_object(kind):
    done = run_script("grpo/tools/bench.py", kind, *SIZES)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().split("\n")[-1])
    keys = {"time_ratio", "time_ratio_without_judge", "memory_ratio", "gradient_difference"}
    assert set(result) == (keys if kind == "fill" else keys - {"time_ratio_without_judge"})
    assert result["gradient_difference"] < 1e-5
    assert kind not in ("causal", "vocabulary") or "tokens per second" in done.stdout


@pytest.mark.parametrize("kind", [bench.Fill, bench.Causal, bench.Checkpointed, bench.Vocabulary])
def test_both_sides_have_the_same_gradient(kind, monkeypatch):
    monkeypatch.setattr(distributions, "LOGITS_AT_ONCE", 2 * 5000)  # so that 5,000 tokens are cut into parts
    c, _ = bench.load_config(bench.BenchConfig, [*SIZES, "--vocab_size=5000"])
    both = kind(c)
    both.shared(False)
    ours = both.gradient()
    both.naive(False)
    assert ours.norm() > 0
    torch.testing.assert_close(ours, both.gradient(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("argv", [[], ["speed"], ["fill", "--layers=3"]])
def test_a_benchmark_that_cannot_be_is_refused(argv):
    with pytest.raises(ValueError, match="bench.py fill|unknown key layers"):
        bench.main(argv)


def test_one_side_reports_its_peak_memory_and_nothing_else(capsys):
    bench.main(["fill", "--side=shared", *SIZES])
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"megabytes"} and found["megabytes"] > 1
