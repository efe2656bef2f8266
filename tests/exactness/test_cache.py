"""What is read through a cache of keys and values equals the whole text read at once."""

import pytest
import torch

from core import cache
from core.cache import at_rows, new_cache
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


@pytest.mark.parametrize("padding", [None, PADDING])
@torch.no_grad()
def test_rows_that_continue_a_prompt_equal_the_whole_text_while_others_leave(texts, padding):
    net, (prompt, rest) = causal_model(n_layer=2), texts
    each = None if padding is None else padding[ROWS]
    whole = net(torch.cat((prompt[ROWS], rest), 1), padding=each)[:, 7:]
    past, rows = prefilled(net, prompt, padding).expand(ROWS, room=6), torch.arange(9)
    for t in range(6):
        found = net(rest[rows, t : t + 1], None, past, None if padding is None else each[rows])[:, 0]
        torch.testing.assert_close(found, whole[rows, t], rtol=1e-4, atol=1e-4)
        if t in (1, 3):
            keep = torch.tensor([0, 8, 7, 3, 4] if t == 1 else [2, 1, 4])
            past.keep(keep)
            rows = rows[keep]
    assert rows.tolist() == [7, 8, 4] and past.length == 13


@pytest.mark.parametrize("again", [False, True])
def test_a_prompt_that_several_parts_share_gets_the_gradient_of_the_whole_texts(texts, again):
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
    logits = torch.empty_like(whole)
    for rows in ([6, 0, 2, 4, 8], [1, 3], [5, 7]):  # the groups' parts differ
        logits[rows] = net(rest[rows], None, past.expand(ROWS[rows]), each[rows])
    assert past.length == 7
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
