"""The store of kept tokens against the masks that it stands for."""

import pytest
import torch

from core.truncation import KeptCollector, KeptTokens


@pytest.fixture
def mask():
    """(7, 11) bool, with a row of none, a row of one and a row of all."""
    mask = torch.rand(7, 11) < 0.4
    mask[0], mask[2] = False, True
    mask[1] = torch.arange(11) == 10
    return mask


@pytest.mark.parametrize("index", [[], [5, 3, 3, 0]])
def test_selected_split_and_joined_kept_tokens_are_the_rows_of_the_mask(mask, index):
    kept, index = KeptTokens.of(mask), torch.tensor(index, dtype=torch.long)
    part = kept[index]
    assert torch.equal(kept.dense(11), mask)
    assert torch.equal(part.dense(11), mask[index]) and len(part) == len(index)
    assert part.ids.untyped_storage().nbytes() == part.ids.nbytes, "a copy: what was not chosen is let go"
    assert torch.equal(KeptTokens.join([kept, part, kept]).dense(11), torch.cat((mask, mask[index], mask)))
    for x, y in zip(kept.split(3), mask.split(3), strict=True):
        assert torch.equal(x.dense(11), y)


def test_collected_kept_tokens_are_in_the_order_of_their_numbers(mask):
    numbers, collector = torch.tensor([40, 3, 17, 99, 0, 5, 21]), KeptCollector()
    assert collector.joined() is None and KeptTokens.join([None, None]) is None
    for rows in torch.arange(7).split(3):
        collector.add(numbers[rows], KeptTokens.of(mask[rows]))
    assert torch.equal(collector.joined().dense(11), mask[numbers.argsort()])
