"""Published diffusion language models, opened with transformers' own classes, against a forward pass written from their
papers on the files as they are."""

import json
import os

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file

from core.model import MASKED_FILL
from core.models import load_model, load_tokenizer, save_model
from tests.families import DIFFUSION_FAMILIES, folder_maker, name_in_llada, random_ids

HEADS, KEY_HEADS, SIZE, THETA = 4, 2, 8, 5000.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("published"), scale=6.0)


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x):
    """(T, heads, D): rotary positions, the first half of a head with the second (arXiv 2104.09864)."""
    T, _, D = x.shape
    angle = torch.arange(T)[:, None] / THETA ** (torch.arange(0, D, 2) / D)          # (T, D / 2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., : D // 2], x[..., D // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def logits_by_hand(path, family, tokens):
    """(T, V) of one text (T,), from the files: pre-norm attention without a causal mask, then a gated network."""
    raw = load_file(os.path.join(path, "model.safetensors"))

    def w(name, layer=None, part="weight"):
        whole = name if layer is None else f"model.layers.{layer}.{name}"
        return raw.get(name_in_llada(whole) if family == "llada" else f"{whole}.{part}")

    T = len(tokens)
    reads = torch.ones(T, T, dtype=torch.bool)
    if family == "sdar":
        for i in range(T):
            for j in range(T):
                reads[i, j] = j // 4 <= i // 4
    h = w("model.embed_tokens")[tokens]                                              # (T, C)
    for layer in range(2):
        x = norm(h, w("input_layernorm", layer))
        q, k, v = (x @ w(f"self_attn.{name}_proj", layer).T for name in "qkv")
        if DIFFUSION_FAMILIES[family] == "qwen2":
            q, k, v = (y + w(f"self_attn.{name}_proj", layer, "bias") for y, name in zip((q, k, v), "qkv", strict=True))
        q, k, v = (y.view(T, -1, SIZE) for y in (q, k, v))
        if DIFFUSION_FAMILIES[family] == "qwen3":
            q, k = norm(q, w("self_attn.q_norm", layer)), norm(k, w("self_attn.k_norm", layer))
        q, k = turned(q), turned(k)
        out = []
        for head in range(HEADS):
            of = head // (HEADS // KEY_HEADS)
            odds = q[:, head] @ k[:, of].T / SIZE**0.5
            out.append(odds.masked_fill(~reads, -torch.inf).softmax(-1) @ v[:, of])
        h = h + torch.cat(out, -1) @ w("self_attn.o_proj", layer).T
        x = norm(h, w("post_attention_layernorm", layer))
        gate = x @ w("mlp.gate_proj", layer).T
        h = h + (gate * gate.sigmoid() * (x @ w("mlp.up_proj", layer).T)) @ w("mlp.down_proj", layer).T
    head = w("lm_head")
    logits = norm(h, w("model.norm")) @ (w("model.embed_tokens") if head is None else head).T
    if family == "Dream":  # what is predicted for a place is read at the place before it
        logits = torch.cat((logits[:1], logits[:-1]))
    return logits


@pytest.mark.parametrize("family", DIFFUSION_FAMILIES)
@torch.no_grad()
def test_the_logits_are_those_of_the_paper_and_padding_changes_nothing(family, folder):
    path = folder(family)
    model, tokenizer = load_model(path)[0], load_tokenizer(path)
    assert model.mode == MASKED_FILL and not model.start_ids
    assert tokenizer.backend.convert_ids_to_tokens(tokenizer.mask_token_id) == "<|mask|>"
    tokens = random_ids(tokenizer, 3, 11)
    tokens[:, 4:7] = tokenizer.mask_token_id
    model.answer_prompts()
    sampled = torch.tensor([i for i in range(model.vocabulary) if i not in model.banned_ids])
    assert tokenizer.mask_token_id not in sampled and tokenizer.stop_token_id in sampled
    for T in (11, 9):
        expected = torch.stack([logits_by_hand(path, family, row[:T]) for row in tokens])[..., sampled]
        found = model(tokens[:, :T])[..., sampled]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        padding = torch.tensor([0, 2, 5])
        padded = torch.zeros(3, T + 5, dtype=torch.long)
        for row, n in enumerate(padding):
            padded[row, n : n + T] = tokens[row, :T]
            padded[row, n + T :] = tokens[row, 0]
        behind = model(padded, padding=padding)[..., sampled]
        for row, n in enumerate(padding):
            alone = model(padded[row : row + 1, n:])[..., sampled]
            torch.testing.assert_close(behind[row, n:], alone[0], rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("family", DIFFUSION_FAMILIES)
@torch.no_grad()
def test_what_is_saved_opens_again_in_transformers_own_words(family, folder, tmp_path):
    model, tokenizer = load_model(folder(family))[0], load_tokenizer(folder(family))
    save_model(str(tmp_path / "out"), model, tokenizer)
    values = json.load(open(tmp_path / "out" / "config.json"))
    assert values["model_type"] == DIFFUSION_FAMILIES[family] and "auto_map" not in values
    assert all("transformer." not in name for name in load_file(tmp_path / "out" / "model.safetensors"))
    tokens = random_ids(tokenizer, 2, 9)
    assert torch.equal(load_model(str(tmp_path / "out"))[0](tokens), model(tokens))
