"""The work that trainers are compared on: lengths that are drawn beforehand, operations that are counted."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from core.model import GPT, LANGUAGE_MODEL, GPTConfig
from grpo.benchmarks.work import MEAN_LENGTH, Work, check_lengths, counted_operations

TINY = Work(n_layer=2, n_head=2, n_embd=16, vocab_size=20, batch_size=2, group_size=3, prompt_length=5,
            completion_length=4)


def test_mixed_lengths_depend_on_the_step_alone_and_have_the_mean_of_a_geometric_distribution_that_is_cut():
    work = Work(mixed=True)
    assert (work.lengths(3) == work.lengths(3)).all() and (work.lengths(3) != work.lengths(4)).any()
    drawn = np.concatenate([work.lengths(step).flatten() for step in range(200)])
    assert drawn.min() >= 1 and drawn.max() == work.completion_length
    expected = MEAN_LENGTH * (1 - (1 - 1 / MEAN_LENGTH) ** work.completion_length)  # sum of P(length >= j), j = 1 .. 64
    assert abs(drawn.mean() - expected) < 4 * drawn.std() / len(drawn) ** 0.5
    with pytest.raises(AssertionError, match="are not those that were drawn"):
        check_lengths(work.lengths(3).flatten().tolist(), work, 4)


def test_five_forward_passes_read_a_prompt_once_for_its_group():
    T, lengths, pairs = TINY.prompt_length, np.array([[1, 4, 2], [3, 4, 4]]), 0
    net = GPT(GPTConfig(LANGUAGE_MODEL, TINY.vocab_size, TINY.vocab_size, T + TINY.completion_length, TINY.n_layer,
                        TINY.n_head, TINY.n_embd))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for group in lengths:
            net.states(torch.zeros(1, T, dtype=torch.long))
            pairs += sum(column + 1 for column in range(T))
            for length in group:
                net.states(torch.zeros(1, length - 1, dtype=torch.long))  # the last token is not read
                net.project(torch.zeros(1, length, TINY.n_embd))
                pairs += sum(column + 1 for column in range(T, T + length - 1))
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    attention = TINY.n_layer * pairs * 2 * 2 * TINY.n_embd  # a multiplication and an addition for each of q k and p v
    assert products > attention and counted_operations(TINY, lengths) == 5 * (products + attention)
