"""Rows are cut into parts of like length, and into parts of a number of tokens."""

import itertools

import pytest
import torch

from core.performance.batching import parts_of_like_length, parts_of_tokens


def cost_of(parts, length, overhead):
    return sum(len(part) * max(int(length[i]) for i in part) + overhead for part in parts)


@pytest.mark.parametrize("overhead", [0, 3, 1000])
def test_no_cut_into_like_lengths_is_cheaper(overhead):
    """All cuts of the sorted rows are tried; other groupings than of neighbours cannot have less padding."""
    length = torch.randint(1, 12, (9,))
    order, best = length.argsort(descending=True).tolist(), float("inf")
    for cuts in itertools.product([False, True], repeat=8):
        parts = [[order[0]]]
        for row, cut in zip(order[1:], cuts, strict=True):
            parts.append([row]) if cut else parts[-1].append(row)
        best = min(best, cost_of(parts, length, overhead))
    found = parts_of_like_length(length, overhead)
    assert cost_of(found, length, overhead) == best
    assert sorted(torch.cat(found).tolist()) == list(range(9))


def test_parts_of_tokens_hold_at_most_so_many_and_every_row_once():
    size = torch.tensor([5, 1, 9, 3, 3, 14, 2])
    parts = parts_of_tokens(size, 10)
    assert sorted(torch.cat(parts).tolist()) == list(range(7))
    assert [int(size[part].sum()) for part in parts] == [14, 9, 8, 6]
    assert len(parts_of_tokens(size, 1000)) == 1 and parts_of_tokens(size[:0], 10) == []
