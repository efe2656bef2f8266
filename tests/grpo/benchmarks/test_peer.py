"""The table and the ratios of the comparison with TRL."""

import json
import sys

import pytest

from grpo.benchmarks import peer
from grpo.benchmarks.peer import PHASES, PeerConfig, chosen_work, report
from grpo.benchmarks.work import CASES, Work, counted_operations


def records(*steps):
    """Records of steps of so many seconds, half of them in generation."""
    return [dict.fromkeys(PHASES, 0.0) | {"generation": s / 2, "step": s, "megabytes": 100.0} for s in steps]


def test_a_table_has_the_median_step_its_rate_and_its_share_of_the_peak(capsys):
    work = Work(mixed=True)
    found = report(work, {"trl": records(8.0, 2.0, 4.0), "ours": records(1.0, 2.0, 3.0)}, 1e9,
                   PeerConfig(warmup=1, steps=3))
    assert found == {"trl": 4.0, "ours": 2.0}
    lines = {line[:22].strip(): line[22:].split() for line in capsys.readouterr().out.split("\n")}
    assert lines["generation, seconds"] == ["2.000", "1.000"]
    assert (lines["fastest step"], lines["slowest step"]) == (["2.000", "1.000"], ["8.000", "3.000"])
    drawn = [work.lengths(step) for step in (1, 2, 3)]
    tokens, operations = sorted((lengths.sum(), counted_operations(work, lengths)) for lengths in drawn)[1]
    assert lines["tokens per second"] == [f"{tokens / 4:.0f}", f"{tokens / 2:.0f}"]
    assert lines["% of matmul peak"] == [f"{100 * operations / 1e9 / s:.1f}" for s in (4, 2)]


@pytest.mark.parametrize("settings, message", [
    ({"cases": "T,X"}, "cases: 'X' is not one of T, S"), ({"sides": "verl"}, "sides: 'verl' is not one of trl"),
    ({"steps": 0}, "steps=0 must be at least 1"), ({"cases": "T", "n_head": 3}, "n_embd=128 must be a multiple")])
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PeerConfig(**settings)


def test_sizes_that_are_set_replace_those_of_the_case():
    work = chosen_work(CASES["S_long"], PeerConfig(n_layer=2, group_size=4))
    assert (work.n_layer, work.group_size, work.n_embd, work.prompt_length, work.mixed) == (2, 4, 384, 256, True)


@pytest.mark.parametrize("package, side, message", [
    ("trl", "trl", "bench.py peer needs the package trl: pip install -r requirements-peer.txt"),
    ("transformers", "ours_hf", "sides=ours_hf needs the package transformers")])
def test_a_package_that_is_missing_is_named_before_the_first_measurement(monkeypatch, package, side, message):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(peer, "matmul_peak", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=message):
        peer.run_peer(PeerConfig(sides=f"ours,{side}"))


@pytest.mark.slow
def test_the_benchmark_prints_a_table_and_the_ratio_of_the_steps(capsys):
    pytest.importorskip("trl")
    peer.run_peer(PeerConfig(cases="T_mixed", sides="trl,ours", n_layer=1, n_head=2, n_embd=16, batch_size=2,
                             group_size=2, prompt_length=4, completion_length=6, steps=1))
    out = capsys.readouterr().out
    lines = {line[:22].strip(): line[22:].split() for line in out.split("\n")}
    trl, ours = map(float, lines["step, seconds"])
    assert json.loads(out.strip().split("\n")[-1]) == {"ratio_T_mixed": pytest.approx(trl / ours, rel=0.1)}
    assert out.count("% of matmul peak") == 1
