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
    model = backend.backend_tokenizer.model
    tokens = backend.convert_ids_to_tokens(range(len(backend)))
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(SIZES["layers"])
    writer.add_context_length(128)
    writer.add_embedding_length(SIZES["hidden"])
    writer.add_feed_forward_length(SIZES["wide"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    special = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([special[i in backend.all_special_ids] for i in range(len(tokens))])
    writer.add_token_merges(merges_of(model))
    writer.add_eos_token_id(backend.convert_tokens_to_ids("<|im_end|>"))
    writer.add_chat_template(backend.chat_template)
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


def merges_of(model):
    """The merges of a byte-pair model of the package tokenizers, as texts."""
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in json.loads(model.__getstate__())["merges"]]


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
