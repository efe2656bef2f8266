"""The benchmarks: each command prints a table and one JSON object, on the same work for all sides."""

import dataclasses
import json
import sys
import time

import numpy as np
import pytest
import torch

from bench import bench, peer
from bench.peer import MEAN_LENGTH, Work, ending, ending_noise, share_of_letter
from bench.sides import in_turns
from core.distributions import draw_uniforms, sample_from
from grpo.policies import causal

SIZES = ["--n_layer=1", "--n_embd=16", "--batch_size=2", "--group_size=3", "--device=cpu"]
TINY = Work(n_layer=1, n_head=2, n_embd=16, batch_size=2, group_size=3, prompt_length=4, completion_length=8,
            mixed=True)


@pytest.fixture(autouse=True)
def unchanged(monkeypatch):
    """What a child process changes for itself is as before after a test."""
    monkeypatch.setattr(causal, "draw_uniforms", draw_uniforms)


def steps_of(run, *arguments, steps=2):
    """The records of a side that takes its steps in this process."""
    records = []

    def turn(record):
        records.append(record)
        return len(records) <= steps

    run(*arguments, turn)
    return records[1:]


@pytest.mark.slow
@pytest.mark.parametrize("argv, rows", [
    (["fill", "--block_size=32"], ["seconds", "seconds, no judge", "peak MB"]),
    (["causal", "--prompt_length=20", "--completion_length=4"], ["seconds", "peak MB"])])
def test_a_comparison_measures_both_sides_in_processes_of_their_own_and_their_gradients_are_equal(argv, rows, capsys):
    bench.main(argv + SIZES)
    out = capsys.readouterr().out.strip().split("\n")
    shown = {line[:24].strip(): line[24:].split() for line in out}
    result = json.loads(out[-1])
    assert result.pop("gradient_difference") < 1e-5
    for row, ratio in zip(rows, result.values(), strict=True):
        naive, shared, printed = map(float, shown[row])
        assert printed == ratio == pytest.approx(naive / shared, rel=0.01, abs=0.006)


@pytest.mark.slow
def test_the_ratios_to_trl_are_those_of_steps_with_the_lengths_of_the_work(capsys, monkeypatch):
    """Every side checks the lengths of its completions itself."""
    pytest.importorskip("trl")
    monkeypatch.setattr(peer, "CASES", {"mixed": TINY, "even": dataclasses.replace(TINY, mixed=False)})
    monkeypatch.setattr(peer, "in_turns", lambda calls, steps: [steps_of(*call, steps=steps) for call in calls])
    bench.main(["peer", "--cases=even,mixed", "--steps=1"])
    out = capsys.readouterr().out.strip().split("\n")
    expected = {}
    rows = [line.split()[-3:] for line in out if line.startswith("seconds of a step")]
    for case, row in zip(("even", "mixed"), rows, strict=True):
        trl, ours, same_model = map(float, row)
        expected[f"ratio_{case}"] = pytest.approx(trl / ours, rel=0.1)
        expected[f"ratio_{case}_hf"] = pytest.approx(trl / same_model, rel=0.1)
    assert json.loads(out[-1]) == expected


@pytest.mark.parametrize("argv, message", [
    (["speed"], "bench.py fill"), (["fill", "--layers=3"], "layers"), (["peer", "--cases=T,X"], "'X'"),
    (["peer"], "pip install trl")])
def test_a_benchmark_that_cannot_be_is_refused(argv, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ValueError, match=message):
        bench.main(argv)


def test_mixed_lengths_depend_on_the_step_alone_and_have_the_mean_of_a_geometric_distribution_that_is_cut():
    work = Work(mixed=True)
    assert (work.lengths(3) == work.lengths(3)).all() and (work.lengths(3) != work.lengths(4)).any()
    drawn = np.concatenate([work.lengths(step).flatten() for step in range(200)])
    assert drawn.min() >= 1 and drawn.max() == work.completion_length
    expected = MEAN_LENGTH * (1 - (1 - 1 / MEAN_LENGTH) ** work.completion_length)  # sum of P(length >= j), j = 1 .. 64
    assert abs(drawn.mean() - expected) < 4 * drawn.std() / len(drawn) ** 0.5
    with pytest.raises(AssertionError):
        share_of_letter(["a"] * 64, work.lengths(3).flatten().tolist(), work, 4)


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


def clocked_steps(name, turn):
    """Steps that report when they ran."""
    go_on = turn(None)
    while go_on:
        start = time.monotonic()
        time.sleep(0.01)
        go_on = turn((name, start, time.monotonic()))


def failing_steps(turn):
    turn(None)
    raise SystemExit(3)


@pytest.mark.slow
def test_sides_take_their_steps_one_after_another_and_a_child_that_ends_early_is_noticed():
    a, b = in_turns([(clocked_steps, "a"), (clocked_steps, "b")], steps=3)
    in_order = [record for pair in zip(a, b, strict=True) for record in pair]
    assert [name for name, *_ in in_order] == ["a", "b"] * 3
    assert all(end <= start for (*_, end), (_, start, _) in zip(in_order, in_order[1:]))
    with pytest.raises(ValueError, match="exit code 3"):
        in_turns([(failing_steps,)], steps=1)
