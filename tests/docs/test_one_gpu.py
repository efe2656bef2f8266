"""The figures of docs/one_gpu.md: what a layer keeps of a token, measured, and the sums made of it."""

from types import SimpleNamespace

import pytest
import torch

from grpo.grpo_config import GRPOConfig
from grpo.tools import gpu_check
from tests.test_docs import tables
from tests.tiny import one_process

DOCUMENT, GIB, PROMPT = "docs/one_gpu.md", 2**30, 64
SHAPES = {name: shape for name, (shape, _) in gpu_check.SHAPES.items()} | {
    "3 B": (2048, 11008, 36, 16, 2), "7 B": (3584, 18944, 28, 28, 4)}
KEPT = {cells[0]: {name: int(cell.replace(",", "")) for name, cell in zip(heading[1:], cells[1:], strict=True)}
        for heading, cells in tables(DOCUMENT) if heading[0] == "bytes"}


def way(rank, checkpoint):
    return ("LoRA" if rank else "all weights") + ", `grad_checkpoint`" * checkpoint


def kept(model, length):
    """Bytes that autograd keeps of 4 texts behind a prompt that they share, without the weights."""
    found = {x.untyped_storage().data_ptr(): 0 for x in (*model.parameters(), *model.buffers())}

    def note(x):
        storage = x.untyped_storage()
        found.setdefault(storage.data_ptr(), storage.nbytes())
        return x

    with one_process("bfloat16").autocast():
        past = model.new_cache()
        model.states(torch.zeros(1, PROMPT, dtype=torch.long), past=past)
        past = past.expand(torch.zeros(4, dtype=torch.long))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            h = model.states(torch.zeros(4, length, dtype=torch.long), past=past)
    assert h.requires_grad
    return sum(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("name, scale", [("0.5 B", 1), ("1.5 B", 1), ("3 B", 1), ("7 B", 2)])
def test_a_layer_keeps_the_bytes_of_the_table(name, scale, monkeypatch):
    """Two layers keep those of one more than one layer, and texts of 64 tokens those of 32 more than texts of 32.
    scale: every size is divided by it, which spares memory"""
    pytest.importorskip("peft")
    monkeypatch.setattr(gpu_check, "TOKENIZER", SimpleNamespace(**vars(gpu_check.TOKENIZER) | {"vocab_size": 300}))
    width, inner, _, *heads = (size // scale for size in SHAPES[name])
    for rank in (0, 16):
        c = GRPOConfig(lora_rank=rank // scale)
        model = gpu_check.model_of((width, inner, 2, *heads), c, one_process("bfloat16")).eval()
        for checkpoint in (False, True):
            model.grad_checkpoint, found = checkpoint, []
            for n_layer in (1, 2):
                model.body.config.num_hidden_layers = n_layer
                found.append((kept(model, 64) - kept(model, 32)) / (4 * 32))
            assert scale * (found[1] - found[0]) == pytest.approx(KEPT[way(rank, checkpoint)][name], rel=2e-3)


def gib(name, rank, checkpoint, P, G, M, prompt, logits):
    """The sum of the page, as code."""
    C, inner, L, heads, n_key = SHAPES[name]
    V, D = (152_064 if name == "7 B" else 151_936), C // heads
    layer = 2 * C * C + 2 * C * n_key * D + 3 * C * inner + 3 * C + 2 * n_key * D
    numbers = L * layer + C + V * C * (1 + (name == "7 B"))
    adapter = 16 * L * (2 * (C + C) + 2 * (C + n_key * D) + 3 * (C + inner))
    tokens, per = P * (prompt + G * M), KEPT[way(rank, checkpoint)][name]
    whole = KEPT[way(rank, False)][name]
    activations = tokens * (L * per + whole) if checkpoint else L * whole * (tokens + 0.075 * P * G * prompt)
    weights = 2 * numbers + 16 * adapter + activations + logits
    if not rank:
        weights = 12 * numbers + max(4 * numbers + 4 * V * C, 2 * numbers + 6 * V * C + activations + logits)
    cache = P * G * (prompt + M) * 4 * L * n_key * D
    return (weights + (0 if rank else 2 * numbers) + cache) / GIB


def test_the_table_of_what_fits_and_the_figures_of_the_check_are_the_sum():
    rows = [cells for heading, cells in tables(DOCUMENT) if heading[0] == "card"]
    assert len(rows) == 8
    for card, name, trained, batch, checkpoint, figure in rows:
        logits = (2 if card == "24 GB" else 4) * GIB
        found = gib(name, 16 * (trained == "LoRA"), checkpoint == "True", *map(int, batch.split(" x ")), 200, logits)
        assert float(figure) == pytest.approx(found, abs=0.3) and found < (0.84 * int(card.split()[0]))
    for name in ("0.5 B", "1.5 B"):
        figures = [gib(name, *how, 4, 8, 256, 64, 4 * GIB) for how in gpu_check.WAYS]
        assert gpu_check.SHAPES[name][1] == pytest.approx(figures, abs=0.3)
