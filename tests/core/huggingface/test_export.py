"""core/huggingface/export.py: transformers computes what our models compute, from a folder that it opens by itself."""

import json
import os
import random
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from core.distributions import draw_uniforms
from core.generation import Stop, generate
from core.huggingface.export import (
    as_fast_tokenizer,
    ascii_normalizer,
    copy_merged,
    new_folder,
    qwen3_config,
    qwen3_weights,
    write_causal,
)
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL
from core.models import load_model
from core.tokenizer import ASCII, CharTokenizer, fold_to_ascii
from tests.families import adapter_folder, model_folder, spoiled
from tests.tiny import CAUSAL, judge, model, small_bpe

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

TAGS = ("<think>", "</think>", "<th", "</think> so", "</")  # two begin with another, before or after it in the list
ALONE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
answers = []
for folder, inputs, texts, prompts in json.load(open("questions.json")):
    net, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [net(torch.tensor([ids])).logits[0].tolist() for ids in inputs]
    greedy = [net.generate(**tokenizer(text, return_tensors="pt"), do_sample=False, max_new_tokens=20)[0].tolist()
              for text in prompts]
    answers.append([logits, [tokenizer(text).input_ids for text in texts],
                    [tokenizer.decode(ids, skip_special_tokens=True) for ids in greedy]])
assert not [name for name in sys.modules if name.split(".")[0] in ("core", "grpo")]
json.dump(answers, open("answers.json", "w"))
"""


TOKENIZERS = {"characters": lambda: CharTokenizer(), "stop": lambda: CAUSAL,
              "tags": lambda: CharTokenizer(tags=TAGS, stop=True),
              "few": lambda: CharTokenizer("abc\u00e9 1]^-\\", stop=True)}


def texts(count=300):
    """Random texts with tags, names of special tokens, digits, spaces, line ends and characters of all scripts."""
    rng, out = random.Random(0), ["", " ", "\n", "don't 'LL 'x 12345678 a\r\n\n b  \t"]
    parts = [*"aaab bc \n\n\r\t.!'+=1234567", *TAGS, "'s", "<|endoftext|>", "e\u0301",
             *"\u017f\u2026\u201c\u2014\u00bd\u00e9\ufb01\u3000\xa0\x85\u0130\ud55c\U0001f389"]
    for _ in range(count):
        other = [chr(rng.choice((rng.randrange(1, 0x3000), rng.randrange(0xE000, 0x110000)))) for _ in range(3)]
        out.append("".join(rng.choices(parts + other, k=rng.randrange(1, 40))))
    return out


def causal(tokenizer, tied=False, **settings):
    """A random language model whose norms differ and which often writes the stop token."""
    net = model(LANGUAGE_MODEL, 3, 6.0, tokenizer, tied=tied, n_layer=2, block_size=48, **settings)
    with torch.no_grad():
        for p in net.parameters():
            if p.dim() == 1:
                p.add_(0.3 * torch.randn_like(p))
        if tokenizer.stop_token_id is not None and not tied:
            net.head.weight[tokenizer.stop_token_id] *= 2
    return net


def folder_of(path, tokenizer, tied=False):
    """(our model, the folder that holds it in Hugging Face's format)."""
    net = causal(tokenizer, tied)
    with new_folder(str(path)) as folder:
        write_causal(net, tokenizer, folder)
    return net, str(path)


def some_inputs(tokenizer):
    """Rows of ids of several lengths, the longest that fits among them."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(tokenizer.base_vocab_size, (1, n), generator=generator) for n in (1, 2, 17, 48)]


@torch.no_grad()
def largest_difference(ours, theirs, inputs):
    """Of the logits of two functions of ids, relative to the largest logit."""
    differences = [(a - b).abs().max() / a.abs().max() for a, b in ((ours(ids), theirs(ids)) for ids in inputs)]
    return float(max(differences))


def opened(path):
    net = transformers.AutoModelForCausalLM.from_pretrained(path)
    return lambda ids: net(ids).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["characters", "tags"])
def test_transformers_computes_equal_logits(tmp_path, kind, tied):
    tokenizer = TOKENIZERS[kind]()
    net, path = folder_of(tmp_path / "hf", tokenizer, tied)
    assert largest_difference(net, opened(path), some_inputs(tokenizer)) < 1e-5
    config = transformers.AutoConfig.from_pretrained(path)
    assert config.vocab_size == tokenizer.base_vocab_size, "special tokens are left out"
    assert config.tie_word_embeddings == tied and config.max_position_embeddings == 48


def test_the_eps_of_query_and_key_norms_is_made_up_for():
    net = causal(CAUSAL)
    with torch.no_grad():
        for block in net.blocks:  # as small as eps, so that eps matters
            block.attention.qkv.weight[:32] *= 2e-4
    theirs = transformers.Qwen3ForCausalLM(qwen3_config(net, None)).eval()
    weights, logits = qwen3_weights(net), lambda ids: theirs(ids).logits
    theirs.load_state_dict(weights)
    assert largest_difference(net, logits, some_inputs(CAUSAL)) < 1e-5
    for name in weights:
        if "q_proj" in name or "k_proj" in name:
            weights[name] = weights[name] / (1e-5 / torch.finfo(torch.float32).eps) ** 0.5
    theirs.load_state_dict(weights)
    assert largest_difference(net, logits, some_inputs(CAUSAL)) > 1e-2, "without the factor they differ"


def test_transformers_alone_gives_equal_logits_ids_and_greedy_texts_in_a_fresh_process(tmp_path):
    questions, models = [], []
    prompts = ["7+8=", "the quick", "<think>a", "aab", "12", "b b b"]
    for i, (kind, tied) in enumerate((("stop", False), ("tags", True))):
        tokenizer = TOKENIZERS[kind]()
        net, path = folder_of(tmp_path / f"hf{i}", tokenizer, tied)
        models.append((net, tokenizer))
        questions.append([path, [ids[0].tolist() for ids in some_inputs(tokenizer)], texts(), prompts])
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    done = subprocess.run([sys.executable, "-I", "-c", ALONE], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ended = 0
    for (net, tokenizer), (logits, encoded, greedy) in zip(models, json.loads((tmp_path / "answers.json").read_text()),
                                                           strict=True):
        found = iter([torch.tensor([rows]) for rows in logits])
        assert largest_difference(net, lambda ids, found=found: next(found), some_inputs(tokenizer)) < 1e-5
        assert encoded == [tokenizer.encode(text) for text in texts()]
        for prompt, text in zip(prompts, greedy, strict=True):
            ids = tokenizer.encode(prompt)
            out = generate(net, torch.tensor([ids]), None, draw_uniforms(0, 0, [0], (1, 20)), Stop(tokenizer), 0.0)
            length = int(out.mask.sum())
            assert text == tokenizer.decode(ids) + tokenizer.decode(out.target[0, :length].tolist())
            ended += not out.truncated[0]
    assert ended, "completions that end at the stop token are among them"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokenizer_gives_equal_ids_and_texts(tmp_path, kind):
    ours = TOKENIZERS[kind]()
    as_fast_tokenizer(ours, 1000).save_pretrained(tmp_path)
    theirs, rng = transformers.AutoTokenizer.from_pretrained(tmp_path), random.Random(1)
    for text in texts():
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids, repr(text)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    for _ in range(100):  # what a model may write, broken characters too
        ids = rng.choices(range(ours.base_vocab_size), k=20)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids, special="")
    assert theirs.eos_token_id == ours.stop_token_id and len(theirs) == ours.base_vocab_size


def test_characters_are_folded_as_ours_are():
    import unicodedata
    normalizer = ascii_normalizer(ASCII)
    found = [c for c in map(chr, range(0x10000)) if unicodedata.decomposition(c) or ord(c) % 97 == 0]
    different = [c for c in [*found, *ASCII, *"\r\t\x00\x7f"] if not "\ud800" <= c <= "\udfff"
                 and normalizer.normalize_str(c) != "".join(d for d in fold_to_ascii(c)[0] if d in ASCII)]
    assert len(found) > 4000 and len(different) < 10, "only of characters that one side's Unicode does not know"


def test_a_vocabulary_with_two_equal_tokens_is_refused():
    for tags in (("a",), ("<x>", "<x>"), ("<|endoftext|>",)):
        with pytest.raises(ValueError, match="repeat a character, a tag or"):
            as_fast_tokenizer(CharTokenizer(tags=tags, stop=True), 10)


def test_the_end_token_is_declared_everywhere(tmp_path):
    _, path = folder_of(tmp_path / "stop", CAUSAL)
    for config in (transformers.AutoConfig, transformers.GenerationConfig):
        assert config.from_pretrained(path).eos_token_id == CAUSAL.stop_token_id
    again = load_huggingface_tokenizer(path)
    assert again.stop_token_ids == CAUSAL.stop_token_ids and again.encode_prompt("a\u00e9") == CAUSAL.encode("a\u00e9")
    _, path = folder_of(tmp_path / "none", CharTokenizer())
    assert transformers.GenerationConfig.from_pretrained(path).eos_token_id is None
    assert load_huggingface_tokenizer(path).stop_token_ids == ()


def test_an_exported_model_is_read_back_with_equal_logits(tmp_path):
    net, path = folder_of(tmp_path / "hf", CAUSAL)
    again, _ = load_model(path)
    assert again.mode == LANGUAGE_MODEL and again.longest_input == net.longest_input
    assert largest_difference(net, again, some_inputs(CAUSAL)) < 1e-5


def test_weights_are_written_in_the_type_asked_for(tmp_path):
    for dtype in (torch.bfloat16, torch.float16):
        net, path = causal(CAUSAL), str(tmp_path / str(dtype))
        write_causal(net, CAUSAL, path, dtype)
        again = transformers.AutoModelForCausalLM.from_pretrained(path)
        assert again.dtype == dtype
        assert torch.equal(again.model.layers[1].mlp.down_proj.weight, net.blocks[1].down.weight.to(dtype))
        assert largest_difference(net, lambda ids, net=again: net(ids).logits.float(), some_inputs(CAUSAL)) < 0.1


def test_the_gated_network_is_the_squared_relu():
    """Also for inputs as large as float32 carries them, and with the only activation that vLLM's Qwen3 has."""
    net = causal(CAUSAL)
    config, weights = qwen3_config(net, None), qwen3_weights(net)
    mlp = transformers.models.qwen3.modeling_qwen3.Qwen3MLP(config)
    part = "model.layers.1.mlp."
    mlp.load_state_dict({name.removeprefix(part): x for name, x in weights.items() if name.startswith(part)})
    x = torch.randn(500, config.hidden_size) * torch.logspace(-4, 4, 500)[:, None]
    h = net.blocks[1].up(x)
    assert config.hidden_act == "silu" and h.abs().max() > 1e3
    torch.testing.assert_close(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), h.relu() ** 2, rtol=1e-6, atol=3e-8)


def test_writing_shows_no_progress(tmp_path, capfd):
    transformers.logging.enable_progress_bar()
    folder_of(tmp_path / "hf", CAUSAL)
    assert capfd.readouterr() == ("", "")


def test_a_model_that_transformers_has_no_architecture_for_is_refused(tmp_path, monkeypatch):
    byte_pairs = small_bpe(monkeypatch)
    for net, tokenizer, words in ((model(), CharTokenizer(), "mode masked_fill, for which transformers has no"),
                                  (judge(), CharTokenizer(), "mode sequence_scorer, for which transformers has no"),
                                  (causal(byte_pairs), byte_pairs, "a tokenizer of kind bpe, but only a vocabulary of")):
        with pytest.raises(ValueError, match=f"^checkpoint=x has {words}"):
            write_causal(net, tokenizer, str(tmp_path / "hf"), where="checkpoint=x")
    assert not os.listdir(tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=f"^out={tmp_path}/file/new cannot be written .*Not a directory.*; name anoth"):
        with new_folder(f"{tmp_path}/file/new"):
            raise AssertionError("not entered")


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with new_folder(str(tmp_path / "a" / "b")) as folder:
            (tmp_path / "a" / os.path.basename(folder) / "half").write_text("")
            assert not (tmp_path / "a" / "b").exists()
            raise KeyboardInterrupt
    assert not os.listdir(tmp_path / "a")
    with new_folder(str(tmp_path / "c") + "/") as folder:
        (tmp_path / os.path.basename(folder) / "file").write_text("old")
    assert os.listdir(tmp_path / "c") == ["file"]
    with pytest.raises(ValueError, match=f"out={tmp_path}/c: {tmp_path}/c exists, and nothing is overwritten"):
        with new_folder(str(tmp_path / "c")):
            raise AssertionError("not entered")
    assert (tmp_path / "c" / "file").read_text() == "old"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "bert"])
def test_a_merged_adapter_gives_the_logits_of_base_and_adapter(tmp_path, family):
    peft = pytest.importorskip("peft")
    kind = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    base = model_folder(tmp_path / "base", family, scale=6.0)
    adapter = adapter_folder(tmp_path / "adapter", base, task_type=None if family == "bert" else "CAUSAL_LM")
    copy_merged(adapter, str(tmp_path / "merged"))
    plain, merged = kind.from_pretrained(base), kind.from_pretrained(tmp_path / "merged")
    with_adapter = peft.PeftModel.from_pretrained(kind.from_pretrained(base), adapter).eval()
    inputs = [torch.randint(100, (2, n)) for n in (1, 9, 30)]
    assert largest_difference(lambda ids: with_adapter(ids).logits, lambda ids: merged(ids).logits, inputs) < 1e-5
    assert largest_difference(lambda ids: plain(ids).logits, lambda ids: merged(ids).logits, inputs) > 1e-2
    old, new = (transformers.AutoTokenizer.from_pretrained(path) for path in (base, tmp_path / "merged"))
    assert old.get_vocab() == new.get_vocab() and old.chat_template == new.chat_template
    assert old("the quick 7+8").input_ids == new("the quick 7+8").input_ids
    if family == "qwen3":  # ends that generation_config alone declares
        assert load_huggingface_tokenizer(str(tmp_path / "merged")).stop_token_ids == load_huggingface_tokenizer(
            base).stop_token_ids and len(merged.generation_config.eos_token_id) == 2


def test_the_tokenizer_beside_an_adapter_comes_before_that_of_its_base(tmp_path):
    pytest.importorskip("peft")
    base = model_folder(tmp_path / "base", "llama")
    adapter = adapter_folder(tmp_path / "adapter", base)
    own = transformers.AutoTokenizer.from_pretrained(base)
    own.chat_template = "{{ messages[0].content }}"
    own.save_pretrained(adapter)
    copy_merged(adapter, str(tmp_path / "merged"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == own.chat_template


def test_a_full_model_is_copied_in_the_type_asked_for(tmp_path):
    base = model_folder(tmp_path / "base", "llama")
    copy_merged(base, str(tmp_path / "copy"), torch.bfloat16)
    old, new = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (base, tmp_path / "copy"))
    assert old.dtype == torch.float32 and new.dtype == torch.bfloat16
    for (name, p), q in zip(old.named_parameters(), new.parameters(), strict=True):
        assert torch.equal(p.to(torch.bfloat16), q), name


def test_an_adapter_that_cannot_be_merged_is_one_line(tmp_path):
    pytest.importorskip("peft")
    adapter = adapter_folder(tmp_path / "adapter", model_folder(tmp_path / "base", "llama"))
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())

    def error(**changes):
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings | changes))
        with pytest.raises((ValueError, FileNotFoundError), match=f"checkpoint={adapter}[^\n]*$") as caught:
            copy_merged(adapter, str(tmp_path / "merged"))
        return str(caught.value)

    other = model_folder(tmp_path / "other", "llama", n_embd=16)
    assert "is not an adapter of this model" in error(base_model_name_or_path=other)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"half")
    assert "header too small" in error()


def test_quantised_weights_and_unknown_kinds_of_models_are_one_line(tmp_path):
    quantised = spoiled(tmp_path / "quantised", model_folder(tmp_path / "base", "llama"),
                        quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    reward = model_folder(tmp_path / "reward", "bert_reward")
    for folder, words in ((quantised, "has quantised weights"), (reward, "is a reward model or classifier")):
        with pytest.raises(ValueError, match=f"^checkpoint={folder} {words}[^\n]*$"):
            copy_merged(folder, str(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()
