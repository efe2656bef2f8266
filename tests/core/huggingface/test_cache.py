"""transformers' caches behind the methods of core.cache.Cache. What models compute with them: test_model.py."""

import pytest
import torch

pytest.importorskip("transformers")

from core.huggingface.cache import empty_cache
from tests.families import architecture, tokenizer_of


def test_a_group_goes_on_from_the_states_of_its_prompt_which_stay_as_they_are_and_get_the_gradient():
    _, config = architecture("mamba2", tokenizer_of("padded"))
    prompts = empty_cache(config)
    shapes = {"conv": (2, 3, 4), "recurrent": (2, 4, 8, 8)}
    conv, recurrent = (torch.randn(shape, requires_grad=True) for shape in shapes.values())
    prompts.content.update_conv_state(conv, 0)
    prompts.content.update_recurrent_state(recurrent, 0)
    group = prompts.expand(torch.tensor([0, 0, 1]))
    assert prompts.is_recurrent and group.is_recurrent
    own = group.content.layers[0]
    for states in (own.conv_states[0], own.recurrent_states[0]):
        rows = torch.tensor([1.0, 2.0, 5.0]).view(3, *[1] * (states.dim() - 1))
        (states * rows).sum().backward()
        with torch.no_grad():
            states.zero_()
    for x in (conv, recurrent):
        assert (x.grad[0] == 3).all() and (x.grad[1] == 5).all()
    kept = prompts.content.layers[0]
    assert torch.equal(kept.conv_states[0], conv) and torch.equal(kept.recurrent_states[0], recurrent)
    group.keep(torch.tensor([2]))
    assert len(own.conv_states[0]) == len(own.recurrent_states[0]) == 1


def test_layers_of_full_attention_alone_are_written_in_place():
    _, config = architecture("gemma3", tokenizer_of("start"))  # a sliding window, then full attention
    prompts = empty_cache(config)
    keys = torch.randn(2, 2, 5, 8)
    for i in range(2):
        prompts.content.update(keys, keys, i)
    with torch.no_grad():
        sliding, full = prompts.expand(torch.tensor([1, 0, 0]), room=3).content.layers
        held = full.keys.data_ptr()
        full.update(keys[[0, 0, 0], :, :1], keys[[0, 0, 0], :, :1])
    assert full.keys.data_ptr() == held and full.keys.shape[2] == 6 and not hasattr(sliding, "whole")
    torch.testing.assert_close(full.keys, torch.cat((keys[[1, 0, 0]], keys[[0, 0, 0], :, :1]), 2))
    assert not prompts.is_recurrent
