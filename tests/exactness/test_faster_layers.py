"""Compiled layers and packed weights compute what the plain layers do."""

import pytest
import torch
from torch import nn

from core.cache import new_cache
from core.model import LANGUAGE_MODEL, MASKED_FILL
from core.performance import prepacked as module
from core.performance.prepacked import prepacked
from tests.tiny import causal_model, model

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "dtype"), [(LANGUAGE_MODEL, torch.bfloat16), (MASKED_FILL, torch.float32)])
def test_compiled_layers_compute_what_plain_ones_do_and_a_frozen_copy_exactly_the_same(mode, dtype):
    """So that the first ratio is 1 and the first KL is 0: a policy is read with gradients, its reference without."""
    torch.compiler.reset()
    net, tokens = model(mode, n_layer=3, scale=2.0), torch.randint(0, 90, (4, 12))
    padding, rows = torch.tensor([2, 0, 1, 0]), torch.tensor([0, 0, 1, 1, 2, 3])
    plain = net.frozen()
    net.compile_layers()
    twin = net.frozen()

    def read(net):
        """States of whole texts, and of texts that continue those of a cache."""
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            found, past = [net.states(tokens[:, 3:]), net.states(tokens[:, :5])], new_cache(net)
            if mode == LANGUAGE_MODEL:
                net.states(tokens[:, :7], past=past, padding=padding)
                found.append(net.states(tokens[rows, 7:], None, past.expand(rows), padding[rows]))
            return found

    learning = read(net)
    sum(h.sum() for h in learning).backward()
    assert all(p.grad is not None for name, p in net.named_parameters() if name.startswith("blocks."))
    with torch.no_grad():
        for a, b, c in zip(learning, read(twin), read(plain), strict=True):
            assert a.requires_grad and torch.equal(a, b)
            close = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(b, c, rtol=close, atol=close)


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_packed_weights_give_the_same_logits_and_leave_the_plain_layers(dtype, monkeypatch):
    monkeypatch.setattr(module, "PACK_FROM", 0)
    net, tokens = causal_model(scale=1.0), torch.randint(0, 90, (3, 11))
    packs = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        plain = net(tokens)
        with prepacked(net):
            assert all(("forward" in vars(layer)) == packs for layer in net.modules() if type(layer) is nn.Linear)
            packed = net(tokens)
        assert torch.equal(net(tokens), plain)
    close = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(packed, plain, rtol=close, atol=close)
