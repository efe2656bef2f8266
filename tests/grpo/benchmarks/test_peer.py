"""The comparison with TRL: both sides' completions end where they should, the table, the ratios."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from core.distributions import draw_uniforms, sample_from
from grpo.benchmarks import peer
from grpo.benchmarks.peer import PHASES, PeerConfig, report
from grpo.benchmarks.peer_ours import ending_noise, our_steps, problems
from grpo.benchmarks.peer_trl import EndAtDrawnLength, trl_steps
from grpo.benchmarks.work import CASES, Work, counted_operations
from grpo.policies import causal

TINY = Work(n_layer=1, n_head=2, n_embd=16, batch_size=2, group_size=3, prompt_length=4, completion_length=8,
            mixed=True)


def steps_of(steps):
    """The records of two steps, taken in this process. steps: calls turn as a side of the benchmark does"""
    records = []

    def turn(record):
        records.append(record)
        return len(records) <= 2

    steps(turn)
    return records[1:]


def test_a_table_has_the_median_step_its_rate_and_its_share_of_the_peak(capsys):
    def records(*steps):
        """Records of steps of so many seconds, half of them in generation."""
        return [dict.fromkeys(PHASES, 0.0) | {"generation": s / 2, "step": s, "megabytes": 100.0} for s in steps]

    work = Work(mixed=True)
    found = report(work, {"trl": records(8.0, 2.0, 4.0), "ours": records(1.0, 2.0, 3.0)}, 1e9)
    assert found == {"trl": 4.0, "ours": 2.0}
    lines = {line[:22].strip(): line[22:].split() for line in capsys.readouterr().out.split("\n")}
    assert lines["generation, seconds"] == ["2.000", "1.000"]
    drawn = [work.lengths(step) for step in (1, 2, 3)]
    tokens, operations = sorted((lengths.sum(), counted_operations(work, lengths)) for lengths in drawn)[1]
    assert lines["tokens per second"] == [f"{tokens / 4:.0f}", f"{tokens / 2:.0f}"]
    assert lines["% of matmul peak"] == [f"{100 * operations / 1e9 / s:.1f}" for s in (4, 2)]


@pytest.mark.parametrize("changes, message", [
    ({"cases": "T,X"}, "cases: 'X' is not one of T, S"), ({"sides": "verl"}, "sides: 'verl' is not one of trl"),
    ({"steps": 0}, "steps=0 must be at least 1"), ({"device": "auto"}, "device='auto' is not one of cpu")])
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PeerConfig(**changes)


@pytest.mark.parametrize("package, side, message", [
    ("trl", "trl", "bench.py peer needs the package trl: pip install -r requirements-peer.txt"),
    ("transformers", "ours_hf", "sides=ours_hf needs the package transformers")])
def test_a_package_that_is_missing_is_named_before_the_first_measurement(monkeypatch, package, side, message):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(peer, "matmul_peak", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=message):
        peer.run_peer(PeerConfig(sides=f"ours,{side}"))


@pytest.mark.parametrize("huggingface", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_phase_of_our_steps_is_measured(huggingface, monkeypatch):
    if huggingface:
        pytest.importorskip("transformers")
    monkeypatch.setattr(causal, "draw_uniforms", draw_uniforms)  # our_steps replaces it
    for record in steps_of(lambda turn: our_steps(TINY, huggingface, {"device": "cpu", "dtype": "float32"}, turn)):
        assert set(record) == {*PHASES, "megabytes"} and all(x > 0 for x in record.values())


def test_on_both_sides_a_completion_ends_at_its_length_and_not_before():
    noise = ending_noise(TINY, draw_uniforms)(0, 5, [0, 1], (3, 8))                  # (P, G, M)
    logits = torch.randn(2, 8, TINY.vocab_size, generator=torch.Generator().manual_seed(0)) / 10
    drawn = [sample_from(logp, u.T).T for logp, u in zip(logits.log_softmax(-1), noise, strict=True)]
    ends = torch.stack(drawn) == TINY.stop_id                                        # (P, G, M)
    lengths = torch.from_numpy(TINY.lengths(5))
    assert (ends.sum(-1) == 1).all() and (ends.int().argmax(-1) + 1 == lengths).all()
    end, flat = EndAtDrawnLength(TINY.lengths(5), TINY.stop_id), torch.zeros(TINY.rows, TINY.vocab_size)
    first = torch.stack([end(None, flat).softmax(-1)[:, TINY.stop_id] for _ in range(8)], 1)  # (N, M)
    assert set(first.unique().tolist()) == {0.0, 1.0}
    assert ((first == 1).int().argmax(1) + 1 == lengths.flatten()).all()


def test_two_ranks_divide_the_prompts_of_a_step():
    ranks = [problems(TINY, 3, SimpleNamespace(batch_size=1), SimpleNamespace(rank=r)) for r in (0, 1)]
    assert [list(part["number"]) for part in ranks] == [[0], [1]]
    assert [list(part["input"][0]) for part in ranks] == TINY.prompts(3).tolist()


@pytest.mark.slow
def test_trl_takes_steps_whose_completions_all_have_the_same_length():
    pytest.importorskip("trl")
    work = dataclasses.replace(TINY, mixed=False, group_size=2)
    for record in steps_of(lambda turn: trl_steps(work, "cpu", "float32", turn)):  # it checks the lengths
        assert set(record) == {*PHASES, "megabytes"} and all(x > 0 for x in record.values())


@pytest.mark.slow
def test_the_benchmark_prints_a_table_and_the_ratio_of_the_steps(capsys, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setitem(CASES, "tiny", TINY)
    monkeypatch.setattr(peer, "matmul_peak", lambda *_: 1e9)
    peer.run_peer(PeerConfig(cases="tiny", sides="trl,ours", steps=1))
    out = capsys.readouterr().out
    lines = {line[:22].strip(): line[22:].split() for line in out.split("\n")}
    trl, ours = map(float, lines["step, seconds"])
    assert json.loads(out.strip().split("\n")[-1]) == {"ratio_tiny": pytest.approx(trl / ours, rel=0.1)}
