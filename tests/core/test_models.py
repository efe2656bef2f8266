"""Models of every kind, loaded and saved by their path."""

import json
import os
import re
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from core.huggingface.settings import LoraConfig
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.model import GPT
from core.models import is_huggingface, load_model, load_tokenizer, save_model
from tests.families import adapter_folder, folder_maker, random_ids, refused, spoiled, tokenizer_of
from tests.tiny import CAUSAL, causal_model, same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """family -> the folder of a small random model."""
    return folder_maker(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("family", ["llama", "qwen3", "bert"])
def test_a_saved_model_is_a_folder_that_transformers_opens_with_equal_logits(family, folder, tmp_path):
    tokenizer = load_tokenizer(folder(family))
    model, facts = load_model(folder(family), tokenizer=tokenizer)
    kind = "AutoModelForMaskedLM" if family == "bert" else "AutoModelForCausalLM"
    theirs = getattr(transformers, kind).from_pretrained(folder(family)).eval()
    assert facts == {}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    path = str(tmp_path / "model")
    for step in (1, 2):  # also over an older one
        save_model(path, model, tokenizer, step=step)
    assert json.load(open(os.path.join(path, "nano_grpo.json")))["step"] == 2
    again = type(theirs).from_pretrained(path).eval()
    tokens = random_ids(tokenizer, 2, 9)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model.net(tokens).logits)
        assert not torch.equal(again(tokens).logits, theirs(tokens).logits)
    back = transformers.AutoTokenizer.from_pretrained(path)
    assert back("7+8= the fox").input_ids == tokenizer.backend("7+8= the fox").input_ids
    assert load_huggingface_tokenizer(path).stop_token_ids == tokenizer.stop_token_ids
    assert sorted(os.listdir(tmp_path)) == ["model"] and not any(name.endswith(".bin") for name in os.listdir(path))
    loaded, _ = load_model(path, tokenizer=tokenizer)
    with torch.no_grad():
        assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_is_saved_in_the_precision_that_is_asked_for(dtype, folder, tmp_path):
    model, _ = load_model(folder("llama"))
    before = {name: p.clone() for name, p in model.weights().items()}
    save_model(str(tmp_path / "model"), model, load_tokenizer(folder("llama")), dtype=dtype)
    found = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"), dtype="auto").state_dict()
    assert {p.dtype for p in found.values()} == {dtype} and found.keys() == before.keys()
    assert all(torch.equal(p, before[name].to(dtype)) for name, p in found.items())
    assert all(p.dtype == torch.float32 and torch.equal(p, before[name]) for name, p in model.weights().items())


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_a_mixture_of_experts_is_a_model_like_others(name, tmp_path):
    shape = {"vocab_size": 290, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    net = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shape)).eval()
    net.save_pretrained(tmp_path)
    tokenizer_of("start").save_pretrained(tmp_path)
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        ours, theirs = load_model(str(tmp_path))[0](tokens), net(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_path_says_whose_model_it_is(folder, tmp_path):
    ours, net = str(tmp_path / "g.safetensors"), causal_model()
    save_model(ours, net, CAUSAL, step=7)
    assert is_huggingface(folder("llama")) and is_huggingface("hf:owner/name") and not is_huggingface(ours)
    assert not is_huggingface(str(tmp_path / "missing.safetensors"))
    loaded, facts = load_model(ours, tokenizer=CAUSAL)
    assert isinstance(loaded, GPT) and same(loaded, net) and facts == {"step": 7}
    assert load_tokenizer(ours).description() == CAUSAL.description()
    assert load_tokenizer(folder("llama")).encode("7+8=") == transformers.AutoTokenizer.from_pretrained(
        folder("llama"))("7+8=", add_special_tokens=False).input_ids


def test_a_folder_of_a_run_is_refused_with_the_name_of_the_model_in_it(tmp_path):
    save_model(str(tmp_path / "model.safetensors"), causal_model(), CAUSAL)
    refused(str(tmp_path), os.path.join(str(tmp_path), "model.safetensors"))


def test_an_adapter_of_a_model_of_ours_is_refused(tmp_path):
    path = str(tmp_path / "g.safetensors")
    save_model(path, causal_model(), CAUSAL)
    with pytest.raises(ValueError, match="lora_rank=4 is for Hugging Face models"):
        load_model(path, adapter=LoraConfig(lora_rank=4))


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "notes").mkdir()
    refused(str(tmp_path / "notes"), "config.json")
    refused(str(tmp_path / "nowhere"))


def test_a_tokenizer_that_does_not_fit_is_refused(folder, tmp_path):
    refused(folder("llama"), "vocabulary", tokenizer=load_huggingface_tokenizer(folder("bert")))
    path = spoiled(tmp_path / "narrow", folder("llama"))
    small = transformers.LlamaConfig.from_pretrained(path)
    small.vocab_size = 200  # of a tokenizer with 290 tokens
    transformers.LlamaForCausalLM(small).save_pretrained(path)
    refused(path, "200", "290")


def test_without_transformers_the_remedy_is_the_pip_line(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(folder("llama"), "pip install -r requirements-hf.txt")


def test_a_folder_whose_tokenizer_is_missing_is_refused(folder, tmp_path):
    path = spoiled(tmp_path / "mute", folder("llama"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        os.remove(os.path.join(path, name))
    refused(path, "tokenizer")


@pytest.mark.parametrize("kind", ["Mamba", "OPT"])
def test_a_family_whose_output_layers_need_more_than_hidden_states_is_one_line(kind, tmp_path):
    tokenizer = tokenizer_of("start")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "ffn_dim": 32, "word_embed_proj_dim": 16} if kind == "OPT" else {}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    path = str(tmp_path / "model")
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    refused(path, f"{kind}ForCausalLM does not work with hidden states alone", "docs/huggingface.md")


def public(cls):
    """The names that a class of ours adds to a module of torch."""
    return {name for part in cls.__mro__ if part.__module__.startswith("core.") for name in vars(part)
            if not name.startswith("_")}


def test_both_kinds_of_model_offer_the_model_interface(folder):
    """The list of GPT's docstring; attributes of an instance count too."""
    text = GPT.__doc__.partition("The model interface")[2].partition("the rest of the code:")[2]
    listed = set(re.findall(r"[a-z_]+", text.partition("and the")[0]))
    assert {"mode", "states", "project", "suffix", "dimensions"} <= listed and len(listed) > 10
    for net in (causal_model(), load_model(folder("llama"))[0]):
        missing = listed - public(type(net)) - vars(net).keys()
        assert not missing, f"{type(net).__name__} lacks {missing}"
    assert (causal_model().suffix, load_model(folder("llama"))[0].suffix) == (".safetensors", "")


@pytest.mark.parametrize("inside, words", [
    ((), "correct the path"), (("model.safetensors",), "name the model in it, {}/model.safetensors"),
    (("model",), "name the model in it, {}/model"), (("config.json",), "correct the path")])
def test_a_folder_without_a_model_names_what_to_use_if_there_is_something(tmp_path, inside, words):
    """The out_dir of a run has a config.json of its own, with the settings of the run."""
    for name in inside:
        (tmp_path / name).write_text('{"batch_size": 4}')
    with pytest.raises(ValueError) as error:
        is_huggingface(str(tmp_path), "init_from")
    assert str(error.value) == (f"init_from={tmp_path} is a folder without a Hugging Face config.json; "
                                + words.format(tmp_path))
    with pytest.raises(ValueError, match="is a folder without a Hugging Face config.json"):
        load_tokenizer(str(tmp_path), "init_from")


def test_a_missing_path_is_a_model_of_ours_that_is_not_there():
    for load in (load_model, load_tokenizer):
        with pytest.raises(FileNotFoundError, match="generator_checkpoint=nowhere does not exist"):
            load("nowhere", key="generator_checkpoint")


@pytest.mark.parametrize("settings", [{"lora_rank": 4}, {"lora_init_from": "x"},
                                      {"lora_rank": 4, "load_in_4bit": True}])
def test_settings_of_adapters_are_refused_for_a_model_of_ours(tmp_path, settings):
    save_model(str(tmp_path / "g"), causal_model(), CAUSAL)
    with pytest.raises(ValueError, match="is for Hugging Face models, which key=.*g is not; leave it out"):
        load_model(str(tmp_path / "g"), adapter=LoraConfig(**settings), key="key")


def test_an_adapter_without_its_base_is_one_line_for_model_and_tokenizer(folder, tmp_path):
    pytest.importorskip("peft")
    path = adapter_folder(tmp_path / "adapter", spoiled(tmp_path / "base", folder("llama")))
    assert load_tokenizer(path).encode("7+8=") == load_tokenizer(folder("llama")).encode("7+8=")
    os.rename(tmp_path / "base", tmp_path / "gone")
    for load in (load_model, load_tokenizer):
        with pytest.raises(ValueError, match=f"^key={path} is an adapter whose base model .*base' is not there"):
            load(path, key="key")
