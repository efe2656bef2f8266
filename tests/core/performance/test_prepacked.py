"""Packed weights: the same results, and nothing of it left afterwards."""

import pytest
import torch
from torch import nn

from core.performance import prepacked as module
from core.performance.prepacked import prepacked
from tests.tiny import causal_model

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_packed_weights_give_the_same_logits(dtype, monkeypatch):
    monkeypatch.setattr(module, "PACK_FROM", 0)
    net, tokens = causal_model(scale=1.0), torch.randint(0, 90, (3, 11))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        plain = net(tokens)
        with prepacked(net):
            assert all("forward" in vars(layer) for layer in net.modules() if type(layer) is nn.Linear)
            packed = net(tokens)
        assert torch.equal(net(tokens), plain), "the plain layers are back"
    close = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(packed, plain, rtol=close, atol=close)
    assert not any("forward" in vars(layer) for layer in net.modules())


@needs_onednn
@torch.no_grad()
def test_layers_with_a_bias_and_of_other_kinds_compute_what_they_did(monkeypatch):
    monkeypatch.setattr(module, "PACK_FROM", 0)
    net, x = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8).double()), torch.randn(5, 3, 8)
    plain = net[0](x)
    with prepacked(net):
        with prepacked(net):  # a caller may have packed them already
            torch.testing.assert_close(net[0](x), plain)
        assert "forward" in vars(net[0]) and "forward" not in vars(net[1])
    assert torch.equal(net[0](x), plain)


def test_with_gradients_or_for_small_layers_nothing_is_packed(monkeypatch):
    net = causal_model()
    with torch.no_grad(), prepacked(net):
        assert not any("forward" in vars(layer) for layer in net.modules())
    monkeypatch.setattr(module, "PACK_FROM", 0)
    with prepacked(net):
        assert not any("forward" in vars(layer) for layer in net.modules())


@needs_onednn
@torch.no_grad()
def test_a_gpt2_of_transformers_computes_the_same_with_packed_layers(monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(module, "PACK_FROM", 0)
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)).eval()
    tokens = torch.randint(0, 50, (3, 9))
    plain = net(tokens).logits
    with prepacked(net.transformer.h):
        packed = [m for m in net.modules() if "forward" in vars(m)]
        assert [type(m).__name__ for m in packed] == ["Conv1D"] * 8, "four in each layer, and no output layer"
        torch.testing.assert_close(net(tokens).logits, plain, rtol=1e-5, atol=1e-5)
