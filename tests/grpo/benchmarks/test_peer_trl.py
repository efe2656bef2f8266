"""TRL's side of the comparison."""

import dataclasses

import pytest
import torch

from grpo.benchmarks.peer_trl import EndAtDrawnLength, letter, settings, trl_steps
from grpo.benchmarks.work import Work
from tests.grpo.benchmarks.test_peer_ours import TINY, steps_of


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


@pytest.mark.parametrize("problems, group, rows", [(8, 8, 16), (3, 8, 12), (8, 6, 16), (2, 6, 12), (1, 34, 2)])
def test_one_optimizer_step_takes_all_completions_whatever_the_sizes(problems, group, rows):
    args = settings(Work(batch_size=problems, group_size=group), "cpu", "float32")
    assert args["per_device_train_batch_size"] == rows
    assert args["gradient_accumulation_steps"] * rows == problems * group


@pytest.mark.slow
def test_without_drawn_lengths_no_completion_ends_by_itself():
    """trl_steps checks the lengths; test_peer.py has a step with drawn ones."""
    pytest.importorskip("trl")
    work = dataclasses.replace(TINY, mixed=False, group_size=2)
    for record in steps_of(lambda turn: trl_steps(work, "cpu", "float32", turn)):
        assert set(record) == {"generation", "reference", "policy", "optimizer", "rest", "step", "megabytes"}
        assert all(x > 0 for x in record.values())
