"""LoRA: the adapter alone is trained and saved, and the reference is the same weights without it."""

import json
import os
import shutil

import pytest
import torch

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

from core.errors import Mistake
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.logger import Logger
from core.models import load_model, save_model
from core.supervised.config import PretrainConfig
from core.trainer import Trainer
from grpo.grpo_config import GRPOConfig
from tests.families import adapter_folder, base_model, expect_close, expect_equal_gradients, model_folder
from tests.tiny import one_process

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


TOKENS = torch.tensor([[5, 9, 33, 70, 12, 90, 41], [7, 7, 19, 28, 64, 3, 80]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> (folder of a model, folder of a random adapter of it)."""
    root, made = tmp_path_factory.mktemp("lora"), {}

    def of(family):
        if family not in made:
            base = model_folder(root / family, family)
            made[family] = base, adapter_folder(root / f"{family}-adapter", base)
        return made[family]
    return of


def load(path, dtype=torch.float32, kind=PretrainConfig, **settings):
    """The model of a folder with an adapter."""
    return load_model(str(path), adapter=kind(**settings), dtype=dtype)[0]


def trained(model):
    """Moves what the model trains, by a few steps of SGD. Returns the model."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        (-model(TOKENS).log_softmax(-1)[..., 5].mean()).backward()
        optimizer.step()
    return model


@torch.no_grad()
def logits(model):
    return model(TOKENS)


@torch.no_grad()
def expect_those_of_peft(model, path, adapter):
    """Checks the logits of the ids that a model may sample."""
    net = peft.PeftModel.from_pretrained(base_model(path), str(adapter)).eval()
    start, end = (TOKENS.new_tensor([ids] * 2).view(2, -1) for ids in (model.start_ids, model.end_ids))
    theirs = net(torch.cat((start, TOKENS, end), 1)).logits[:, len(model.start_ids) :]
    ours, theirs = logits(model), theirs[:, : TOKENS.shape[1], : model.vocabulary]
    sampled = ours[0, 0] > -1e8
    expect_close(ours[..., sampled], theirs[..., sampled])


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_adapter_alone_is_trained_and_the_reference_stays_the_base_model_to_the_last_bit(family, folders):
    path, _ = folders(family)
    plain, model = logits(load_model(path)[0]), load(path, lora_rank=4)
    reference = model.frozen()
    assert torch.equal(logits(model), plain) and torch.equal(logits(reference), plain)
    before = {name: p.clone() for name, p in model.net.named_parameters()}
    found = {id(p) for group in model.parameters_by_kind().values() for p in group}
    trained(model)
    for name, p in model.net.named_parameters():
        assert ("lora_" in name) == p.requires_grad == (id(p) in found) != torch.equal(p, before[name]), name
    assert torch.equal(logits(reference), plain) and (logits(model) - plain).abs().max() > 0.01
    assert {p.data_ptr() for p in model.parameters()} == {p.data_ptr() for p in reference.parameters()}, "no copy"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_gradient_of_an_adapter_is_that_of_peft_also_with_a_shared_prompt_and_activations_computed_again(
        family, folders):
    path, adapter = folders(family)
    theirs = peft.PeftModel.from_pretrained(base_model(path), adapter, is_trainable=True).eval()
    whole = theirs(TOKENS.repeat_interleave(2, 0)).logits[:, 3:]
    weight = torch.linspace(-1, 1, whole.shape[-1])
    (whole.log_softmax(-1) * weight).sum().backward()
    for checkpointed in (False, True):
        model = load(path, lora_init_from=adapter)
        model.grad_checkpoint = checkpointed
        past = model.new_cache()
        model.states(TOKENS[:, :3], past=past)
        twice = torch.arange(len(TOKENS)).repeat_interleave(2)                       # (4,)
        after = model(TOKENS[twice][:, 3:], past=past.expand(twice))                 # (4, 4, V)
        (after.log_softmax(-1) * weight).sum().backward()
        expect_equal_gradients(model.net, theirs)


def test_weights_in_4_bits_have_the_logits_and_the_gradient_of_a_model_with_their_values(tmp_path):
    """Also after they have been read without gradients, as in sampling, by a model in eval mode."""
    bits = pytest.importorskip("bitsandbytes")
    path = model_folder(tmp_path / "wide", "llama", n_embd=64)  # a block of 4 bits has 64 weights of a row
    model, plain = load(path, lora_rank=4, load_in_4bit=True), load(path, lora_rank=4)
    held = dict(model.net.named_modules())
    with torch.no_grad():
        for name, part in plain.net.named_modules():
            if isinstance(held[name], bits.nn.Linear4bit):
                weight = held[name].weight
                part.weight.copy_(bits.functional.dequantize_4bit(weight, weight.quant_state))
    plain.load_weights(trained(model).weights())
    model.zero_grad()
    assert sum(isinstance(part, bits.nn.Linear4bit) for part in held.values()) == 14
    logits(model)
    for each in (model, plain):
        each(TOKENS).log_softmax(-1)[..., ::2].sum().backward()
    expect_close(logits(model), logits(plain))
    expect_equal_gradients(model.net, plain.net, 1e-4)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_saved_adapter_opens_with_peft_is_a_model_by_itself_and_a_start_whose_reference_stays(
        family, folders, tmp_path):
    path, adapter = folders(family)
    tokenizer, out = load_huggingface_tokenizer(path), tmp_path / "adapter"
    for settings in ({"lora_rank": 4, "lora_alpha": 8.0}, {"lora_init_from": adapter}):
        model = trained(load(path, kind=GRPOConfig, **settings))
        save_model(str(out), model, tokenizer)
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == path
        assert not {"model.safetensors", "reference"} & set(os.listdir(out))
        expect_those_of_peft(model, path, out)
        merged, _ = load_model(str(out), tokenizer=tokenizer, mode=model.mode)
        expect_close(logits(merged), logits(model))
        more = load(path, kind=GRPOConfig, lora_init_from=str(out))
        reference = more.frozen()
        assert torch.equal(logits(more), logits(model)) and torch.equal(logits(reference), logits(model))
        trained(more)
        assert torch.equal(logits(reference), logits(model)) and (logits(more) - logits(model)).abs().max() > 0.01


def test_a_run_resumes_from_the_state_of_its_adapter_alone_and_of_no_other(folders, tmp_path):
    """The state holds no weights of the base model, which may be a copy, or in bfloat16, but not another one."""
    path, _ = folders("llama")
    moved, other = shutil.copytree(path, tmp_path / "moved"), model_folder(tmp_path / "other", "llama", seed=9)

    def loop(base=path, dtype=torch.float32, **settings):
        c = PretrainConfig(init_from=str(base), out_dir=str(tmp_path / "out"), optimizer="adamw", lora_targets="q_proj",
                           **{"lora_rank": 4} | settings)
        model, _ = load_model(str(base), adapter=c, dtype=dtype)
        logger = Logger(c.out_dir, 1, (), silent=True)
        return Trainer(model, c, None, None, load_huggingface_tokenizer(path), logger, one_process())

    loop().save()
    saved = torch.load(tmp_path / "out" / "state.pt", weights_only=True)["model"]
    assert saved and all("lora_" in name for name in saved)
    for changes in ({}, {"dtype": torch.bfloat16}, {"base": moved}):
        loop(**changes).resume()
    for changes in ({"lora_alpha": 128.0}, {"lora_rank": 8, "lora_alpha": 8.0}, {"base": other}):
        with pytest.raises(Mistake, match="state.pt .*config.json"):
            loop(**changes).resume()
