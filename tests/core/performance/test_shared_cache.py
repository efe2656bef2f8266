"""The shared cache holds a prompt once; that it computes what the plain one does is tested in tests/core/test_cache.py."""

import torch

from core import cache
from tests.tiny import causal_model


@torch.no_grad()
def test_a_prompt_is_held_once_however_many_rows_continue_it(monkeypatch):
    monkeypatch.setattr(cache, "SHARE_FROM", 0)
    net, past = causal_model(), causal_model().new_cache()
    net(torch.randint(0, 90, (3, 20)), past=past)
    past = past.expand(torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2]), room=4)
    assert [x.shape[0] * x.shape[2] for x in past.prompts[0]] == [3 * 20] * 2
    assert [x.shape[0] * x.shape[2] for x in past.own.layers[0]] == [9 * 4] * 2
    past.keep(torch.tensor([8, 7]))
    assert [len(x) for x in past.prompts[0]] == [1, 1], "a prompt leaves with the last of its rows"
