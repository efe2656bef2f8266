"""The table and the ratios of the comparison with TRL."""

import json
import sys

import pytest
import torch

from grpo.benchmarks import peer
from grpo.benchmarks.peer import PHASES, PeerConfig, chosen_work, ratios, report
from grpo.benchmarks.work import CASES, Work, counted_operations
from tests.tiny import run_script

TINY = ("--n_layer=1", "--n_head=2", "--n_embd=16", "--batch_size=2", "--group_size=2", "--prompt_length=4",
        "--completion_length=6", "--steps=1")


def records(*steps, megabytes=100.0):
    """Records of steps of so many seconds, half of them in generation."""
    return [dict.fromkeys(PHASES, 0.0) | {"generation": s / 2, "step": s, "megabytes": megabytes} for s in steps]


def test_ratios_are_trls_seconds_over_ours():
    seconds = {"trl": 6.0, "trl_default": 9.0, "ours": 2.0, "ours_hf": 3.0}
    assert ratios("T", seconds) == {"ratio_T": 3.0, "ratio_T_hf": 2.0, "ratio_T_default": 4.5}
    assert ratios("S_long", {"trl": 6.0, "ours": 2.0}) == {"ratio_S_long": 3.0}


def test_a_table_has_the_median_step_its_rate_and_its_share_of_the_peak(capsys):
    work, c = Work(mixed=True), PeerConfig(warmup=1, steps=3)
    found = report(work, {"trl": records(8.0, 2.0, 4.0), "ours": records(1.0, 2.0, 3.0)}, 1e9, c)
    assert found == {"trl": 4.0, "ours": 2.0}
    lines = {line[:22].strip(): line[22:].split() for line in capsys.readouterr().out.split("\n")}
    assert lines["generation, seconds"] == ["2.000", "1.000"]
    assert (lines["fastest step"], lines["slowest step"]) == (["2.000", "1.000"], ["8.000", "3.000"])
    drawn = [work.lengths(step) for step in (1, 2, 3)]
    tokens, operations = sorted((lengths.sum(), counted_operations(work, lengths)) for lengths in drawn)[1]
    assert lines["tokens per second"] == [f"{tokens / 4:.0f}", f"{tokens / 2:.0f}"]
    assert lines["% of matmul peak"] == [f"{100 * operations / 1e9 / s:.1f}" for s in (4, 2)]


@pytest.mark.parametrize("settings, message", [({"cases": "T,X"}, "cases: 'X' is not one of T, S"),
                                               ({"sides": "verl"}, "sides: 'verl' is not one of trl"),
                                               ({"steps": 0}, "steps=0 must be at least 1"),
                                               ({"warmup": -3}, "warmup=-3 must be at least 0"),
                                               ({"cases": "T", "n_head": 3}, "n_embd=128 must be a multiple")])
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PeerConfig(**settings)


def test_sizes_that_are_set_replace_those_of_the_case():
    work = chosen_work(CASES["S_long"], PeerConfig(n_layer=2, group_size=4))
    assert (work.n_layer, work.group_size, work.n_embd, work.prompt_length, work.mixed) == (2, 4, 384, 256, True)


def test_our_sides_need_no_trl(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(peer, "in_turns", lambda sides, *_: {name: records(1.0) for name in sides})
    monkeypatch.setattr(peer, "start", lambda *_: None)
    monkeypatch.setattr(peer, "matmul_peak", lambda *_: 1e9)
    monkeypatch.setattr(peer, "require_trl", lambda: pytest.fail("trl was asked for"))
    peer.run_peer(PeerConfig(cases="T", sides="ours,ours_hf", steps=1))
    assert json.loads(capsys.readouterr().out.strip().split("\n")[-1]) == {}


def test_without_transformers_the_error_comes_before_the_first_measurement(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(peer, "matmul_peak", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match="sides=ours_hf needs the package transformers"):
        peer.run_peer(PeerConfig(sides="ours,ours_hf"))


def test_both_sides_get_the_precision_that_auto_means(monkeypatch):
    monkeypatch.setattr(peer, "detect_dtype", lambda name, device: torch.bfloat16)
    monkeypatch.setattr(peer, "require_trl", lambda: None)
    monkeypatch.setattr(peer, "matmul_peak", lambda *_: 1e9)
    monkeypatch.setattr(peer, "Side", lambda *arguments, **_: arguments)
    monkeypatch.setattr(peer, "report", lambda *_: {})
    started = {}
    monkeypatch.setattr(peer, "in_turns", lambda sides, *_: started.update(sides))
    peer.run_peer(PeerConfig(cases="T", sides="trl,ours", dtype="auto"))
    assert started["trl"][3:] == ("cpu", "bfloat16") and started["ours"][3] == {"device": "cpu", "dtype": "bfloat16"}


def test_every_table_uses_one_peak(monkeypatch, capsys):
    monkeypatch.setattr(peer, "in_turns", lambda sides, *_: {name: records(1.0) for name in sides})
    monkeypatch.setattr(peer, "start", lambda *_: None)
    peaks = iter([1e9])
    monkeypatch.setattr(peer, "matmul_peak", lambda *_: next(peaks))
    peer.run_peer(PeerConfig(cases="T,S", sides="ours", steps=1))
    assert capsys.readouterr().out.count("at 1 GFLOP/s") == 2


@pytest.mark.slow
def test_the_benchmark_prints_a_table_and_one_json_object():
    pytest.importorskip("trl")
    done = run_script("grpo/tools/bench.py", "peer", "--cases=T_long", *TINY)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().split("\n")[-1])
    assert set(result) == {f"ratio_T_long{side}" for side in ("", "_hf", "_default")}
    assert done.stdout.count("% of matmul peak") == 1 and all(ratio > 0 for ratio in result.values())
