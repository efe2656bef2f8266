"""Packed weights: the same results, and nothing of it left afterwards."""

import pytest
import torch
from torch import nn

from core.judge import calculate_judge_scores
from core.model import freeze
from core.models import load_model
from core.performance import prepacked as module
from core.performance.prepacked import has_fast_bfloat16, pack_in_bfloat16, prepacked
from tests.tiny import ROOT, TOKENIZER, causal_model, judge

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_packed_weights_give_the_same_logits(dtype, monkeypatch):
    monkeypatch.setattr(module, "PACK_FROM", 0)
    net, tokens = causal_model(scale=1.0), torch.randint(0, 90, (3, 11))
    packs = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        plain = net(tokens)
        with prepacked(net):
            linear = [layer for layer in net.modules() if type(layer) is nn.Linear]
            assert [("forward" in vars(layer)) for layer in linear] == [packs] * len(linear) != []
            packed = net(tokens)
        assert torch.equal(net(tokens), plain), "the plain layers are back"
    close = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(packed, plain, rtol=close, atol=close)
    assert not any("forward" in vars(layer) for layer in net.modules())


@pytest.mark.slow  # it imports transformers
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


SHIPPED = f"{ROOT}/data/char_diffusion/pretrained/judge.safetensors"
needs_bfloat16 = pytest.mark.skipif(not has_fast_bfloat16(judge()), reason="this CPU has no instructions for bfloat16")


@needs_bfloat16
@pytest.mark.slow
def test_the_shipped_judge_in_bfloat16_gives_nearly_the_same_scores_in_the_same_order():
    texts = torch.tensor(TOKENIZER.encode("the value of the key is returned, or None if there is none. " * 3)[:128])
    texts = texts.repeat(24, 1)                                                      # (24, 128)
    generator = torch.Generator().manual_seed(1)
    broken = torch.rand(24, 128, generator=generator) < torch.linspace(0, 0.9, 24)[:, None]
    texts[broken] = torch.randint(0, 96, (int(broken.sum()),), generator=generator)
    scorer = freeze(load_model(SHIPPED)[0])
    exact = calculate_judge_scores(scorer, texts, TOKENIZER.cls_token_id)
    pack_in_bfloat16(scorer)
    scores = calculate_judge_scores(scorer, texts, TOKENIZER.cls_token_id)
    assert 0 < (scores - exact).abs().max() < 2e-3 and torch.corrcoef(torch.stack((scores, exact)))[0, 1] > 0.999
