"""The columns that a token reads, against loops."""

import pytest
import torch

from core.attention import attend, attention_mask

PADDING = torch.tensor([0, 2, 5])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("before", "T"), [(0, 6), (3, 4), (5, 1)])
def test_a_token_reads_no_padding_and_in_a_language_model_nothing_behind_it(before, T, causal):
    mask = attention_mask(before, T, PADDING, "cpu", causal).expand(3, 1, T, before + T)
    for row, padding in enumerate(PADDING.tolist()):
        for t in range(T):
            own = before + t
            for column in range(before + T):
                reads = column >= padding and (column <= own or not causal)
                assert mask[row, 0, t, column] == (reads or (causal and column == own))
    without = attention_mask(before, T, None, "cpu", causal)
    needed = causal and before > 0 and T > 1
    assert (without is not None) == needed
    if needed:
        assert torch.equal(without[0, 0], torch.ones(T, before + T).tril(before).bool())


def test_attention_is_the_mean_of_values_with_the_weights_of_its_formula():
    q, k, v = torch.randn(3, 2, 1, 4, 8).double()
    mask = torch.rand(2, 1, 4, 4) < 0.5
    mask |= torch.eye(4).bool()
    weight = (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(attend(q, k, v, mask), weight @ v)
    weight = (q @ k.mT / 8**0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(attend(q, k, v, causal=True), weight @ v)
