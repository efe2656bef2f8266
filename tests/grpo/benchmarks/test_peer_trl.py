"""TRL's side of the comparison."""

import dataclasses
import sys

import pytest
import torch

from grpo.benchmarks.peer_trl import EndAtDrawnLength, environment, letter, require_trl, settings, trl_steps
from grpo.benchmarks.side import Side, in_turns
from grpo.benchmarks.work import Work

TINY = Work(n_layer=1, n_head=2, n_embd=16, batch_size=2, group_size=2, prompt_length=4, completion_length=8,
            mixed=True)


def test_without_trl_the_error_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ValueError, match="bench.py peer needs the package trl: pip install -r requirements-peer.txt"):
        require_trl()


def test_a_row_ends_at_its_length_and_not_before():
    lengths = TINY.lengths(0)
    end, written = EndAtDrawnLength(lengths, TINY.stop_id), []
    for _ in range(TINY.completion_length):
        written.append(end(None, torch.zeros(TINY.rows, TINY.vocab_size)).softmax(-1)[:, TINY.stop_id])
    first = torch.stack(written, 1)                                                  # (N, M)
    assert set(first.unique().tolist()) == {0.0, 1.0}
    assert ((first == 1).int().argmax(1) + 1).tolist() == lengths.flatten().tolist()


def test_every_token_id_has_a_character_of_its_own_and_none_is_a_space():
    characters = [letter(i) for i in range(1000)]
    assert len(set(characters)) == 1000 and not any(c.isspace() for c in characters)


@pytest.mark.parametrize("best, rows", [(True, 16), (False, 8)])
def test_both_settings_take_one_optimizer_step_for_all_completions(best, rows):
    args = settings(Work(), best, "cpu", "float32")
    assert args["per_device_train_batch_size"] == rows
    assert args["per_device_train_batch_size"] * args["gradient_accumulation_steps"] == Work().rows
    assert ("gradient_checkpointing" in args) == best and args["bf16"] is False


@pytest.mark.parametrize("sizes, rows, default", [((3, 8), 12, 8), ((8, 6), 16, 8), ((2, 6), 12, 6), ((1, 34), 2, 2)])
def test_no_completion_is_left_out_whatever_the_sizes(sizes, rows, default):
    work = Work(batch_size=sizes[0], group_size=sizes[1])
    for best, expected in ((True, rows), (False, default)):
        args = settings(work, best, "cpu", "float32")
        assert args["per_device_train_batch_size"] == expected
        assert args["gradient_accumulation_steps"] * expected == work.rows


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [True, False])
def test_phases_add_up_to_the_step(mixed):
    pytest.importorskip("trl")
    side = Side(trl_steps, dataclasses.replace(TINY, mixed=mixed), True, "cpu", "float32", **environment(True))
    for record in in_turns({"trl": side}, warmup=0, steps=2)["trl"]:
        whole, _ = record.pop("step"), record.pop("megabytes")
        assert set(record) == {"generation", "reference", "policy", "optimizer", "rest"}
        assert all(seconds > 0 for seconds in record.values())
        assert sum(record.values()) == pytest.approx(whole)
