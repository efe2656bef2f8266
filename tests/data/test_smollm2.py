"""SmolLM2 from its package: the folder holds the file's model, and the sums are checked by their reward."""

import json
import os

import numpy as np
import pytest
import torch

from core.generation import Stop, generate
from core.models import load_model, load_tokenizer
from core.prompts import PromptFormat
from tests.data.test_prepare import run
from tests.families import tokenizer_of

QUESTION = [{"role": "user", "content": "What is the sum 7+9?"}]
SIZES = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "wide": 96}


def write_tiny_gguf(path):
    """A Llama of random weights in 4 bits, with a byte-level tokenizer, a chat template and an end token."""
    gguf = pytest.importorskip("gguf")
    backend, rng = tokenizer_of("chat"), np.random.default_rng(0)
    tokens = backend.convert_ids_to_tokens(range(len(backend)))
    writer = gguf.GGUFWriter(str(path), "llama")
    special = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    merges = json.loads(backend.backend_tokenizer.model.__getstate__())["merges"]
    metadata = {
        "name": "tiny", "block_count": SIZES["layers"], "context_length": 128, "embedding_length": SIZES["hidden"],
        "feed_forward_length": SIZES["wide"], "head_count": SIZES["heads"], "head_count_kv": SIZES["kv_heads"],
        "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0, "vocab_size": len(tokens),
        "tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens,
        "token_types": [special[i in backend.all_special_ids] for i in range(len(tokens))],
        "token_merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in merges],
        "eos_token_id": backend.convert_tokens_to_ids("<|im_end|>"), "chat_template": backend.chat_template}
    for name, value in metadata.items():
        getattr(writer, f"add_{name}")(value)
    for name, shape in shapes(len(tokens)).items():
        weight = rng.normal(size=shape, scale=4 / shape[-1] ** 0.5).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, weight)
            continue
        kind = gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return str(path)


def shapes(vocabulary):
    """{name in a GGUF file: shape} of the weights."""
    C, wide = SIZES["hidden"], SIZES["wide"]
    keys = C // SIZES["heads"] * SIZES["kv_heads"]
    found = {"token_embd.weight": (vocabulary, C), "output_norm.weight": (C,)}
    for i in range(SIZES["layers"]):
        layer = {"attn_norm": (C,), "attn_q": (C, C), "attn_k": (keys, C), "attn_v": (keys, C), "attn_output": (C, C),
                 "ffn_norm": (C,), "ffn_gate": (wide, C), "ffn_up": (wide, C), "ffn_down": (C, wide)}
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found


def written(file, folder, count):
    """(ids, ids) that transformers writes greedily from the GGUF file, and this project from the folder."""
    import transformers
    place, name = os.path.split(file)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, quantization_config=transformers.GgufConfig(name, dequantize=True))
    backend = transformers.AutoTokenizer.from_pretrained(place, gguf_file=name)
    asked = backend.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = theirs.generate(**asked, max_new_tokens=count, do_sample=False)[0]
    model, tokenizer = load_model(folder)[0], load_tokenizer(folder)
    ids = PromptFormat("model").encode(QUESTION, tokenizer)[1]
    found = generate(model, torch.tensor([ids]), None, torch.zeros(1, 1, count), Stop(tokenizer), top_k=1)
    return expected.tolist(), ids + found.target[0].tolist()


def test_a_gguf_file_becomes_a_folder_that_writes_what_transformers_writes_from_the_file(tmp_path):
    file = write_tiny_gguf(tmp_path / "tiny.gguf")
    run("smollm2", f"--gguf={file}", f"--out={tmp_path}/d", "--problems=50")
    expected, found = written(file, f"{tmp_path}/d/model", 12)
    assert expected == found and len(set(found)) > 12
    tokenizer = load_tokenizer(f"{tmp_path}/d/model")
    assert tokenizer.stop_token_names == ("<|im_end|>",) and tokenizer.has_chat_template
