"""The comparison with TRL: both sides' completions end where they should, the table, the ratios."""

import dataclasses
import json
import sys

import pytest
import torch

from core.distributions import draw_uniforms, sample_from
from grpo.benchmarks import peer
from grpo.benchmarks.peer import PeerConfig, report
from grpo.benchmarks.peer_ours import ending_noise, our_steps
from grpo.benchmarks.peer_trl import ending
from grpo.benchmarks.work import Work, counted_operations
from grpo.policies import causal

TINY = Work(n_layer=1, n_head=2, n_embd=16, batch_size=2, group_size=3, prompt_length=4, completion_length=8,
            mixed=True)


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """What a child process changes for itself is as before after a test."""
    monkeypatch.setattr(causal, "draw_uniforms", draw_uniforms)
    monkeypatch.setattr(peer, "ENVIRONMENT", {})


def in_this_process(calls, steps):
    """The records of sides that take their steps one after another, without child processes."""
    return [steps_of(run, *arguments, steps=steps) for run, *arguments in calls]


def steps_of(run, *arguments, steps=2):
    records = []

    def turn(record):
        records.append(record)
        return len(records) <= steps

    run(*arguments, turn)
    return records[1:]


def test_a_table_has_the_median_step_its_rate_and_its_share_of_the_peak(capsys):
    work = Work(mixed=True)
    records = [[{"seconds": s, "megabytes": 100.0} for s in steps] for steps in ((8, 2, 4), (1, 2, 3), (9, 9, 9))]
    assert report(work, records, 1e9) == [4, 2, 9]
    lines = {line[:22].strip(): line[22:].split() for line in capsys.readouterr().out.split("\n")}
    drawn = [work.lengths(step) for step in (1, 2, 3)]
    tokens, operations = sorted((lengths.sum(), counted_operations(work, lengths)) for lengths in drawn)[1]
    assert lines["tokens per second"] == [f"{tokens / s:.0f}" for s in (4, 2, 9)]
    assert lines["% of matmul peak"] == [f"{100 * operations / 1e9 / s:.1f}" for s in (4, 2, 9)]


@pytest.mark.parametrize("changes, message", [
    ({"cases": "T,X"}, "cases: 'X' is not one of T, S"), ({"steps": 0}, "steps=0 must be at least 1"),
    ({"device": "auto"}, "device='auto' is not one of cpu")])
def test_settings_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PeerConfig(**changes)


def test_without_trl_the_command_names_it_before_the_first_measurement(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ValueError, match="bench.py peer needs the package trl: pip install -r requirements-peer.txt"):
        peer.run_peer(PeerConfig())


def test_our_steps_are_measured():
    for record in steps_of(our_steps, TINY, "cpu", "float32", False):
        assert record.keys() == {"seconds", "megabytes"} and all(x > 0 for x in record.values())


def test_on_both_sides_a_completion_ends_at_its_length_and_not_before():
    noise = ending_noise(TINY, draw_uniforms)(0, 5, [0, 1], (3, 8))                  # (P, G, M)
    logits = torch.randn(2, 8, TINY.vocab_size, generator=torch.Generator().manual_seed(0)) / 10
    drawn = [sample_from(logp, u.T).T for logp, u in zip(logits.log_softmax(-1), noise, strict=True)]
    ends = torch.stack(drawn) == TINY.stop_id                                        # (P, G, M)
    lengths = torch.from_numpy(TINY.lengths(5))
    assert (ends.sum(-1) == 1).all() and (ends.int().argmax(-1) + 1 == lengths).all()
    process, flat = ending(TINY, 5), torch.zeros(6, TINY.vocab_size)
    certain = [process(torch.zeros(6, 4 + m), flat).softmax(-1)[:, TINY.stop_id] for m in range(8)]
    certain = torch.stack(certain, 1)                                                # (N, M)
    assert set(certain.unique().tolist()) == {0.0, 1.0}
    assert (certain.argmax(1) + 1 == lengths.flatten()).all()


@pytest.mark.slow
def test_the_ratios_are_those_of_steps_with_the_lengths_of_the_work(capsys, monkeypatch):
    """Every side checks the lengths of its completions itself."""
    pytest.importorskip("trl")
    monkeypatch.setattr(peer, "CASES", {"mixed": TINY, "even": dataclasses.replace(TINY, mixed=False)})
    monkeypatch.setattr(peer, "in_turns", in_this_process)
    peer.run_peer(PeerConfig(cases="even,mixed", steps=1))
    out = capsys.readouterr().out.strip().split("\n")
    expected = {}
    rows = [line.split()[-3:] for line in out if line.startswith("seconds of a step")]
    for case, row in zip(("even", "mixed"), rows, strict=True):
        trl, ours, same_model = map(float, row)
        expected[f"ratio_{case}"] = pytest.approx(trl / ours, rel=0.1)
        expected[f"ratio_{case}_hf"] = pytest.approx(trl / same_model, rel=0.1)
    assert json.loads(out[-1]) == expected
