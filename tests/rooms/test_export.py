"""core/huggingface/export.py: transformers computes what our models compute, from a folder that it opens by itself."""

import random

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from core import export
from core.distributions import draw_uniforms
from core.generation import Stop, generate
from core.huggingface.export import as_fast_tokenizer, write_generator
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import LANGUAGE_MODEL
from core.tokenizer import CharTokenizer
from tests.families import adapter_folder, base_model, model_folder
from tests.tiny import CAUSAL, model

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

TAGS = ("<think>", "</think>", "</think> so")
TOKENIZERS = {"characters": CharTokenizer(), "stop": CAUSAL, "tags": CharTokenizer(tags=TAGS[:2], stop=True),
              "few": CharTokenizer("abc\u00e9 1]^-\\", stop=True)}


def texts(count=200):
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


def exported(path, tokenizer, tied=False, dtype=torch.float32):
    """(our model, the model of transformers from the folder that ours was exported to)."""
    net = causal(tokenizer, tied)
    write_generator(net, tokenizer, path, dtype)
    return net, transformers.AutoModelForCausalLM.from_pretrained(path)


@torch.no_grad()
def largest_difference(ours, theirs, vocabulary=CAUSAL.base_vocab_size):
    """The largest difference of a logit between one of our models and one of transformers, relative to the largest
    logit, on rows of several lengths, the longest that fits among them."""
    generator, found = torch.Generator().manual_seed(1), []
    for length in (1, 2, 17, 48):
        ids = torch.randint(vocabulary, (1, length), generator=generator)
        logits = ours(ids)
        found.append(float((logits - theirs(ids).logits).abs().max() / logits.abs().max()))
    return max(found)


@pytest.mark.parametrize("kind, tied", [("stop", False), ("tags", True)])
def test_transformers_computes_equal_logits_and_greedy_texts(tmp_path, kind, tied):
    tokenizer = TOKENIZERS[kind]
    net, theirs = exported(tmp_path / "hf", tokenizer, tied)
    assert largest_difference(net, theirs, tokenizer.base_vocab_size) < 1e-5
    assert theirs.config.vocab_size == tokenizer.base_vocab_size, "special tokens are left out"
    assert theirs.config.tie_word_embeddings == tied and theirs.config.max_position_embeddings == 48
    fast, ended = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), 0
    for prompt in ("7+8=", "the quick", "<think>a", "12", "b b b"):
        ids = tokenizer.encode(prompt)
        out = generate(net, torch.tensor([ids]), None, draw_uniforms(0, 0, [0], (1, 20)), Stop(tokenizer), top_k=1)
        greedy = theirs.generate(**fast(prompt, return_tensors="pt"), do_sample=False, max_new_tokens=20)[0].tolist()
        assert greedy == ids + out.target[0].tolist()
        ended += not out.truncated[0]
    assert ended or tied, "completions that end at the stop token are among them"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokenizer_gives_equal_ids_and_texts(tmp_path, kind):
    ours = TOKENIZERS[kind]
    as_fast_tokenizer(ours, 1000).save_pretrained(tmp_path)
    theirs, rng = transformers.AutoTokenizer.from_pretrained(tmp_path), random.Random(1)
    for text in texts():
        ids = ours.encode(text)
        assert theirs(text).input_ids == ids, repr(text)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    for _ in range(100):  # what a model may write, broken characters too
        ids = rng.choices(range(ours.base_vocab_size), k=20)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert theirs.eos_token_id == ours.stop_token_id and len(theirs) == ours.base_vocab_size


@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_a_merged_adapter_gives_the_logits_of_base_and_adapter(tmp_path, family):
    peft = pytest.importorskip("peft")
    base = model_folder(tmp_path / family, family, scale=6.0)
    adapter = adapter_folder(tmp_path / "adapter", base)
    export.main([f"--checkpoint={adapter}", f"--out={tmp_path}/merged {family}"])
    merged = base_model(tmp_path / f"merged {family}")
    both = peft.PeftModel.from_pretrained(base_model(base), adapter).eval()
    ids = torch.arange(30).view(2, 15)
    with torch.no_grad():
        expected = both(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
        assert (base_model(base)(input_ids=ids).logits - expected).abs().max() > 1e-2
    new, old = (load_huggingface_tokenizer(path) for path in (str(tmp_path / f"merged {family}"), base))
    assert new.sha256 == old.sha256 and new.stop_token_ids == old.stop_token_ids
