"""LoRA: the adapter alone is trained and saved, and the reference is the same weights without it."""

import json
import os
import re
import shutil
from dataclasses import dataclass

import pytest
import torch

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")

from core.checkpoint_manager import CheckpointManager
from core.huggingface.lora import without_adapter
from core.huggingface.settings import LoraConfig
from core.huggingface.tokenizer import load_huggingface_tokenizer
from core.logger import Logger
from core.models import load_model, save_model
from core.supervised.config import PretrainConfig
from core.trainer import Trainer
from tests.families import adapter_folder, few_quick, model_folder
from tests.families import refused as refused_of_key
from tests.tiny import one_process

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


@dataclass(frozen=True)
class Near(LoraConfig):
    """The settings of a run that is kept near a reference."""
    kl_beta: float = 0.1
    reference_mode: str = "static"
    reference_checkpoint: str | None = None


TOKENS = torch.tensor([[5, 9, 33, 70, 12, 90, 41], [7, 7, 19, 28, 64, 3, 80]])
FAMILIES = ("llama", "gpt2", "qwen3", "bert")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> (folder of a model, folder of a random adapter of it)."""
    root, made = tmp_path_factory.mktemp("lora"), {}

    def of(family):
        if family not in made:
            base = model_folder(root / family, family)
            task = None if family == "bert" else "CAUSAL_LM"
            made[family] = base, adapter_folder(root / f"{family}-adapter", base, task_type=task)
        return made[family]
    return of


def base_model(path, kind=None):
    """transformers' own model of a folder."""
    kind = kind or ("AutoModelForMaskedLM" if "bert" in os.path.basename(path) else "AutoModelForCausalLM")
    return getattr(transformers, kind).from_pretrained(path).eval()


def trained(model, steps=3, lr=0.05):
    """Moves what the model trains, by a few steps of SGD. Returns the model."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=lr)
    for _ in range(steps):
        loss = -model(TOKENS).log_softmax(-1)[..., 5].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def logits(model):
    return model(TOKENS)


@pytest.mark.parametrize("family", few_quick(FAMILIES))
def test_the_adapter_alone_is_trained_and_the_reference_stays_the_base_model_to_the_last_bit(family, folders):
    path, _ = folders(family)
    plain = logits(load_model(path)[0])
    model, _ = load_model(path, adapter=LoraConfig(lora_rank=4))
    reference = model.frozen()
    assert torch.equal(logits(model), plain) and torch.equal(logits(reference), plain)
    before = {name: p.clone() for name, p in model.net.named_parameters()}
    names = {name for name, p in model.net.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name for name in names)
    kinds = model.parameters_by_kind()
    assert {id(p) for group in kinds.values() for p in group} == {
        id(p) for name, p in model.net.named_parameters() if name in names}
    assert not kinds["vectors"] and len(kinds["matrices"]) >= len(names) - 2, "BERT has a linear layer behind them"
    trained(model)
    for name, p in model.net.named_parameters():
        assert torch.equal(p, before[name]) == (name not in names), name
    assert torch.equal(logits(reference), plain) and (logits(model) - plain).abs().max() > 0.01
    assert not torch.equal(logits(model), plain), "reading the reference leaves the adapter on"
    assert {p.data_ptr() for p in model.parameters()} == {p.data_ptr() for p in reference.parameters()}, "no copy"


def test_every_linear_layer_but_the_output_layer_has_an_adapter(folders):
    path, _ = folders("llama")
    model, _ = load_model(path, adapter=LoraConfig(lora_rank=4))
    linear = {name for name, part in base_model(path).named_modules() if isinstance(part, torch.nn.Linear)}
    adapted = {name.split(".lora_")[0].removeprefix("base_model.model.")
               for name, _ in model.net.named_parameters() if "lora_" in name}
    assert adapted == linear - {"lm_head"} and len(adapted) == 2 * 7
    few, _ = load_model(path, adapter=LoraConfig(lora_rank=4, lora_targets=("q_proj", "v_proj")))
    assert {name.split(".lora_")[0].split(".")[-1] for name, _ in few.net.named_parameters()
            if "lora_" in name} == {"q_proj", "v_proj"}


def test_rank_and_alpha_are_those_of_the_paper(folders):
    """W x + alpha / rank * B A x, computed here by hand for every layer (arXiv 2106.09685)."""
    path, _ = folders("llama")
    model, _ = load_model(path, adapter=LoraConfig(lora_rank=3, lora_alpha=12.0))
    trained(model)
    by_hand = base_model(path)
    layers, adapter = dict(by_hand.named_modules()), dict(model.net.named_parameters())
    with torch.no_grad():
        for name, a in adapter.items():
            if "lora_A" in name:
                assert a.shape[0] == 3
                layer = layers[name.split(".lora_A")[0].removeprefix("base_model.model.")]
                layer.weight += 12.0 / 3 * adapter[name.replace("lora_A", "lora_B")] @ a
        expected = by_hand(TOKENS).logits[..., : model.vocabulary]
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_the_model_does_not_depend_on_a_reading_of_its_reference(folders):
    path, adapter = folders("llama")
    for settings in (Near(lora_rank=4), Near(lora_init_from=adapter)):
        found = []
        for read in (False, True):
            model, _ = load_model(path, adapter=settings)
            reference, loss = model.frozen(), model(TOKENS).square().mean()
            if read:
                logits(reference)
            loss.backward()
            found.append({name: p.grad for name, p in model.net.named_parameters() if p.grad is not None})
        assert found[0].keys() == found[1].keys() and found[0]
        assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


@pytest.mark.parametrize("settings", [{"lora_rank": 4}, {"lora_init_from": "adapter"}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_gradient_of_an_adapter_is_that_of_peft_also_with_a_shared_prompt_and_activations_computed_again(
        family, settings, folders):
    path, adapter = folders(family)
    settings = {"lora_init_from": adapter} if "lora_init_from" in settings else settings
    found, plain = [], None
    for checkpointed in (False, True):
        model, _ = load_model(path, adapter=LoraConfig(**settings))
        model.grad_checkpoint = checkpointed
        past = model.new_cache()
        model.states(TOKENS[:, :3], past=past)
        twice = torch.arange(len(TOKENS)).repeat_interleave(2)                       # (4,)
        after = model(TOKENS[twice][:, 3:], past=past.expand(twice))                 # (4, 4, V)
        weight = torch.linspace(-1, 1, after.shape[-1])
        (after.log_softmax(-1) * weight).sum().backward()
        found.append({name: p.grad for name, p in model.net.named_parameters() if p.grad is not None})
    if "lora_init_from" in settings:
        theirs = peft.PeftModel.from_pretrained(base_model(path), adapter, is_trainable=True).eval()
        whole = theirs(TOKENS.repeat_interleave(2, 0)).logits[:, 3:]
        (whole.log_softmax(-1) * weight).sum().backward()
        plain = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for other in filter(None, (found[1], plain)):
        assert found[0].keys() == other.keys() and found[0]
        for name, expected in other.items():
            assert (found[0][name] - expected).norm() <= 1e-5 * max(float(expected.norm()), 1e-2), name


def test_the_adapter_is_float32_beside_a_base_model_in_bfloat16(folders):
    path, adapter = folders("llama")
    for settings in ({"lora_rank": 4}, {"lora_init_from": adapter}):
        model, _ = load_model(path, adapter=LoraConfig(**settings), dtype=torch.bfloat16)
        kinds = {("lora_" in name): p.dtype for name, p in model.net.named_parameters() if p.dim() == 2}
        assert kinds == {True: torch.float32, False: torch.bfloat16}
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(TOKENS) - logits(load_model(path)[0])).abs().max() < (0.5 if "lora_rank" in settings else 10)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_an_adapter_from_a_file_begins_as_peft_reads_it_and_its_start_stays_the_reference(family, folders):
    path, adapter = folders(family)
    model, _ = load_model(path, adapter=Near(lora_init_from=adapter))
    reference, start = model.frozen(), logits(model)
    expect_equal_where_sampled(start, by_peft(path, adapter, model))
    assert (start - logits(load_model(path)[0])).abs().max() > 0.01
    trained(model)
    assert torch.equal(logits(reference), start) and (logits(model) - start).abs().max() > 0.01
    assert all("reference" not in name for name, p in model.net.named_parameters() if p.requires_grad)


def test_a_reference_that_moves_has_an_adapter_of_its_own(folders):
    path, _ = folders("llama")
    model, _ = load_model(path, adapter=Near(lora_rank=4, reference_mode="periodic"))
    reference = model.frozen()
    trained(model)
    now = logits(model)
    reference.load_weights(model.weights())
    assert torch.equal(logits(reference), now)
    trained(model)
    assert torch.equal(logits(reference), now) and not torch.equal(logits(model), now)


def test_the_state_of_a_run_holds_no_weights_of_the_base_model(folders, tmp_path):
    model, _ = load_model(folders("llama")[0], adapter=LoraConfig(lora_rank=4))
    optimizer = torch.optim.AdamW([p for p in trained(model).parameters() if p.requires_grad])
    state_of(model, tmp_path).save(3, model.weights(), [optimizer], {})
    state = torch.load(tmp_path / "state.pt", weights_only=True)["model"]
    assert state.keys() == model.weights().keys() and all("lora_" in name for name in state)
    assert sum(p.numel() for p in state.values()) < 0.5 * model.num_parameters()
    assert os.path.getsize(tmp_path / "state.pt") < 4 * sum(p.numel() for p in state.values()) + 40_000


@torch.no_grad()
def by_peft(path, adapter, model):
    """The logits that peft's model of a folder gives for TOKENS, of the ids that `model` may sample."""
    net = peft.PeftModel.from_pretrained(base_model(path), str(adapter)).eval()
    start, end = (TOKENS.new_tensor([ids] * 2).view(2, -1) for ids in (model.start_ids, model.end_ids))
    out = net(torch.cat((start, TOKENS, end), 1)).logits
    return out[:, len(model.start_ids) :][:, : TOKENS.shape[1], : model.vocabulary]


def expect_equal_where_sampled(ours, theirs):
    sampled = ours[0, 0] > -1e8
    torch.testing.assert_close(ours[..., sampled], theirs[..., sampled], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_saved_adapter_opens_with_peft_is_a_model_by_itself_and_a_start_for_more_training(family, folders, tmp_path):
    path, adapter = folders(family)
    tokenizer, out = load_huggingface_tokenizer(path), tmp_path / "adapter"
    out.mkdir()
    (out / "README.md").write_text("mine")
    for settings in (LoraConfig(lora_rank=4, lora_alpha=8.0), Near(lora_init_from=adapter)):
        model, _ = load_model(path, adapter=settings)
        save_model(str(out), trained(model), tokenizer)
        assert (out / "README.md").read_text() == "mine"
        assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == path
        assert not {"model.safetensors", "reference"} & set(os.listdir(out))
        expect_equal_where_sampled(logits(model), by_peft(path, out, model))
        merged, _ = load_model(str(out), tokenizer=tokenizer, mode=model.mode)
        torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-5)
        assert all(p.requires_grad for p in merged.parameters()), "all of it can be trained"
        more, _ = load_model(path, adapter=LoraConfig(lora_init_from=str(out)))
        assert torch.equal(logits(more), logits(model))


def refused(path, adapter, *words):
    refused_of_key(path, *words, named="", adapter=adapter)


def test_what_does_not_fit_is_one_line(folders, tmp_path):
    path, adapter = folders("llama")
    (tmp_path / "empty").mkdir()
    refused(path, LoraConfig(lora_init_from=str(tmp_path / "empty")), "lora_init_from", "adapter_config.json")
    refused(path, LoraConfig(lora_init_from=folders("bert")[1]), "lora_init_from")
    refused(adapter, LoraConfig(lora_rank=4), "is an adapter", "lora_init_from")
    for i, shape in enumerate(({"n_layer": 3}, {"n_embd": 16})):
        other = adapter_folder(tmp_path / f"a{i}", model_folder(tmp_path / f"m{i}", "llama", **shape))
        refused(path, LoraConfig(lora_init_from=other), "lora_init_from", "not an adapter of this model")


# --- which layers have an adapter


def trainable(model):
    """{name: parameter} of what training changes, without the adapter's name."""
    return {re.sub(r"\.default\b", "", name): p for name, p in model.net.named_parameters() if p.requires_grad}


def test_the_weights_of_an_adapter_are_all_that_is_trained_also_of_embeddings(folders, tmp_path):
    path, _ = folders("llama")
    for targets, count in (("all-linear", 28), (("embed_tokens", "q_proj"), 6), (("lm_head", "embed_tokens"), 4)):
        model, _ = load_model(path, adapter=Near(lora_rank=4, lora_targets=targets, reference_mode="periodic"))
        weights, expected = model.weights(), trainable(model)
        assert weights.keys() == expected.keys() and len(weights) == count
        assert all(weights[name] is p for name, p in expected.items())
        reference = model.frozen()
        assert reference.weights().keys() == weights.keys()
        assert not any(reference.weights()[name] is p for name, p in weights.items())
        saved, there = {name: p.clone() for name, p in trained(model).weights().items()}, logits(model)
        again, _ = load_model(path, adapter=LoraConfig(lora_rank=4, lora_targets=targets))
        again.load_weights(saved)
        assert torch.equal(logits(again), there) and not torch.equal(logits(reference), there)
    save_model(str(tmp_path / "adapter"), model, load_huggingface_tokenizer(path))
    expect_equal_where_sampled(there, by_peft(path, tmp_path / "adapter", model))


@pytest.mark.parametrize("family, layer", [("qwen3", "lm_head"), ("qwen3", "embed_tokens"), ("gpt2", "wte"),
                                           ("bert", "decoder")])
def test_an_adapter_of_tied_embeddings_is_refused(family, layer, folders, tmp_path):
    path, _ = folders(family)
    refused(path, LoraConfig(lora_rank=4, lora_targets=(layer,)), "lora_targets", "tied embeddings", layer)
    kind = base_model(path)
    peft.get_peft_model(kind, peft.LoraConfig(target_modules=[layer])).save_pretrained(
        str(tmp_path), save_embedding_layers=False)
    refused(path, LoraConfig(lora_init_from=str(tmp_path)), f"lora_init_from={tmp_path}", "tied embeddings", layer)


def test_every_name_of_a_layer_must_be_one_of_the_models(folders):
    for targets in (("q_proj", "v_prj"), "q_proj,v_prj", "v_prj", ("q_proj", "roj", "v_prj")):
        refused(folders("llama")[0], LoraConfig(lora_rank=4, lora_targets=targets), "lora_targets", "no layer",
                "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj")
    refused(folders("llama")[0], LoraConfig(lora_rank=4, lora_targets=".*q_proj"), "no layer .*q_proj")
    refused(folders("gpt2")[0], LoraConfig(lora_rank=4, lora_targets="q_proj"), "c_attn, c_fc, c_proj")
    refused(folders("llama")[0], LoraConfig(lora_rank=4, lora_targets="mlp,q_proj"), "lora_targets='mlp,q_proj'")


def test_there_is_a_second_adapter_only_for_a_reference_that_needs_one(folders):
    path, adapter = folders("llama")
    for settings, adapters in ((Near(lora_rank=4), ["default"]), (Near(lora_init_from=adapter), ["default", "reference"]),
                               (LoraConfig(lora_init_from=adapter), ["default"])):
        model, _ = load_model(path, adapter=settings)
        assert list(model.net.peft_config) == adapters
    with pytest.raises(AssertionError, match="nothing keeps the adapter's start"):
        model.frozen()


# --- another base model, other settings


def test_an_adapter_that_was_trained_on_another_architecture_is_refused(folders, tmp_path):
    """Mistral's layers have the names and shapes of Llama's."""
    path, _ = folders("llama")
    other = model_folder(tmp_path / "mistral", "mistral")
    adapter = adapter_folder(tmp_path / "adapter", other)
    refused(path, LoraConfig(lora_init_from=adapter), f"lora_init_from={adapter}", "mistral, not llama")
    copied = shutil.copytree(other, tmp_path / "moved")
    assert load_model(str(copied), adapter=LoraConfig(lora_init_from=adapter))
    shutil.rmtree(other)
    assert load_model(path, adapter=LoraConfig(lora_init_from=adapter)), "nothing tells what it was trained on"


def test_a_fine_tuned_base_and_a_copy_of_it_take_an_adapter(folders, tmp_path):
    path, adapter = folders("llama")
    for other in (model_folder(tmp_path / "other", "llama", seed=9), shutil.copytree(path, tmp_path / "copy")):
        load_model(str(other), adapter=LoraConfig(lora_init_from=adapter))


def state_of(model, out_dir):
    """A CheckpointManager of a training run of this model."""
    return CheckpointManager(str(out_dir), lambda path, **facts: None, suffix="", identity=model.identity())


def test_a_state_of_other_settings_of_the_adapter_is_refused(folders, tmp_path):
    """Its weights have the same names and shapes, so they would be loaded into another model."""
    path, _ = folders("llama")
    same = {"lora_rank": 4, "lora_targets": "q_proj"}
    model, _ = load_model(path, adapter=LoraConfig(**same))
    state_of(model, tmp_path).save(1, model.weights(), [], {})
    moved = shutil.copytree(path, tmp_path / "moved")
    for base, dtype in ((path, torch.float32), (path, torch.bfloat16), (str(moved), torch.float32)):
        again, _ = load_model(base, adapter=LoraConfig(**same), dtype=dtype)
        assert state_of(again, tmp_path).load(again.weights(), [])["step"] == 1
    other = model_folder(tmp_path / "other", "llama", seed=9)
    for base, settings, words in ((path, {"lora_alpha": 128.0}, "lora_alpha=8.0, not 128.0"),
                                  (path, {"lora_rank": 8}, "lora_rank=4, not 8"),
                                  (path, {"lora_targets": "v_proj"}, r"lora_targets=\['q_proj'\], not \['v_proj'\]"),
                                  (other, {}, "the base model's weights .generator_checkpoint or init_from.*'.*, not")):
        now, _ = load_model(base, adapter=LoraConfig(**same | settings))
        with pytest.raises(ValueError, match=f"state.pt is of a run with {words}") as error:
            state_of(now, tmp_path).load(now.weights(), [])
        assert "\n" not in str(error.value) and "config.json" in str(error.value)


def test_supervised_training_refuses_a_state_of_other_settings(folders, tmp_path):
    path, _ = folders("llama")

    def loop(**settings):
        config = PretrainConfig(init_from=path, out_dir=str(tmp_path), optimizer="adamw", lora_rank=4, **settings)
        model, _ = load_model(path, adapter=config)
        return Trainer(model, config, None, None, load_huggingface_tokenizer(path),
                       Logger(str(tmp_path), 1, (), silent=True), one_process())

    loop().save()
    loop().resume()
    with pytest.raises(ValueError, match="state.pt is of a run with lora_alpha=8.0, not 128.0"):
        loop(lora_alpha=128.0).resume()


def test_the_identity_of_a_base_model_depends_on_every_weight_and_not_on_training(folders):
    path, _ = folders("qwen3")
    model, _ = load_model(path, adapter=Near(lora_rank=4, reference_mode="periodic"))
    before = model.identity()
    trained(model)
    model.frozen().load_weights(model.weights())
    assert model.identity() == before
    for name, p in model.net.named_parameters():
        if "lora_" not in name:
            old = p.flatten()[0].item()
            with torch.no_grad():
                p.view(-1)[0] = old + 1
                assert model.identity() != before, name
                p.view(-1)[0] = old
    assert model.identity() == before and load_model(path)[0].identity() == {}


@pytest.mark.parametrize("experts", [0, 4])
def test_the_share_of_weights_without_an_adapter_is_counted(experts):
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
    for layer in layers:
        layer.lora_A = torch.nn.Linear(8, 2, bias=False)
    if experts:
        layers.append(torch.nn.Module())
        layers[-1].experts = torch.nn.Parameter(torch.zeros(experts, 8, 12))
    share, name = without_adapter(layers)
    assert share == pytest.approx(experts * 96 / (experts * 96 + 128)) and name == ("2.experts" if experts else "")
