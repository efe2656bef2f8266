"""Keys and values: shared by a group, copied for each row, and without the rows that have left."""

import pytest
import torch

from core import cache
from core.cache import SharedCache, at_rows, new_cache
from tests.tiny import causal_model

PADDING = torch.tensor([0, 3, 1])
ROWS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])


@pytest.fixture
def texts():
    """Prompts (3, 7) and what continues them (9, 6)."""
    return torch.randint(0, 90, (3, 7)), torch.randint(0, 90, (9, 6))


def prefilled(net, prompt, padding=None):
    past = new_cache(net)
    net(prompt, past=past, padding=padding)
    return past


@pytest.mark.parametrize("share_from", [0, 10**9])
@pytest.mark.parametrize("padding", [None, PADDING])
@torch.no_grad()
def test_rows_that_continue_a_prompt_equal_the_whole_text_read_at_once(texts, padding, share_from, monkeypatch):
    monkeypatch.setattr(cache, "SHARE_FROM", share_from)
    net, (prompt, rest) = causal_model(n_layer=2), texts
    each = None if padding is None else padding[ROWS]
    whole = net(torch.cat((prompt[ROWS], rest), 1), padding=each)[:, 7:]
    past = prefilled(net, prompt, padding).expand(ROWS, room=6)
    assert isinstance(past, SharedCache) == (share_from == 0)
    rows = torch.arange(9)
    for t in range(6):
        found = net(rest[rows, t : t + 1], None, past, None if padding is None else each[rows])[:, 0]
        torch.testing.assert_close(found, whole[rows, t], rtol=1e-4, atol=1e-4)
        if t in (1, 3):  # first a part of each group leaves, then all rows of the first prompt
            keep = torch.tensor([0, 8, 7, 3, 4] if t == 1 else [2, 1, 4])
            past.keep(keep)
            rows = rows[keep]
    assert rows.tolist() == [7, 8, 4] and past.length == 13


@pytest.mark.parametrize("again", [False, True])
def test_one_prompt_is_expanded_several_times_and_its_gradient_is_that_of_the_whole_texts(texts, again):
    net, (prompt, rest) = causal_model(n_layer=2), texts
    net.grad_checkpoint = again
    each, weight = PADDING[ROWS], torch.randn(9, 6, 97)

    def gradient(logits):
        net.zero_grad()
        (logits * weight).sum().backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    whole = net(torch.cat((prompt[ROWS], rest), 1), padding=each)[:, 7:]
    plain = gradient(whole)
    past = prefilled(net, prompt, PADDING)
    before = [x.clone() for pair in past.layers for x in pair]
    logits = torch.empty_like(whole)
    for rows in ([6, 0, 2, 4, 8], [1, 3], [5, 7]):  # the groups' parts differ
        logits[rows] = net(rest[rows], None, past.expand(ROWS[rows]), each[rows])
    assert past.length == 7
    assert all(torch.equal(x, y) for x, y in zip(before, (x for pair in past.layers for x in pair), strict=True))
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient(logits), plain, rtol=1e-3, atol=1e-5 * float(plain.abs().max()))


def test_gradients_of_the_rows_of_a_prompt_are_added_up_in_float32(monkeypatch):
    monkeypatch.setattr(cache, "UNORDERED", ("cpu",))
    x = torch.randn(3, 2, 5, 4, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(9, 2, 5, 4, dtype=torch.bfloat16)
    found = at_rows(x, ROWS)
    found.backward(gradient)
    each = [gradient[ROWS == i].float().sum(0).bfloat16() for i in range(3)]
    assert torch.equal(found, x[ROWS]) and torch.equal(x.grad, torch.stack(each))


@torch.no_grad()
def test_a_prompt_is_held_once_however_many_rows_continue_it(monkeypatch):
    monkeypatch.setattr(cache, "SHARE_FROM", 0)
    past = prefilled(causal_model(), torch.randint(0, 90, (3, 20))).expand(ROWS, room=4)
    assert [x.shape[0] * x.shape[2] for x in past.prompts[0]] == [3 * 20] * 2
    assert [x.shape[0] * x.shape[2] for x in past.own.layers[0]] == [9 * 4] * 2
    past.keep(torch.tensor([8, 7]))
    assert [len(x) for x in past.prompts[0]] == [1, 1], "a prompt leaves with the last of its rows"
