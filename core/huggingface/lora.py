"""LoRA adapters (arXiv 2106.09685): small trainable matrices added to frozen weights with the library peft."""

import os
import re
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from core.errors import Mistake, others
from core.performance.sharding import gathered_state
from core.settings.optional import local_name, require, say_opening
from core.settings.setting import check_finite

BASE = "the base model's weights (generator_checkpoint or init_from)"
SUMMED = 64  # elements of each base weight in the sum of adapter_identity
WEIGHTS = "adapter_model.safetensors"
MAMBA = "mamba2"  # peft refuses an adapter on its out_proj, because a fused kernel would ignore the adapter
ALL_LINEAR = "all-linear"
FULL = SimpleNamespace(has_adapter=False, load_in_4bit=False)  # replaces a config when all weights are trained
POLICY = "default"  # name of the adapter that is trained
REFERENCE = "reference"  # name of its frozen copy


def add_adapter(net, adapter):
    """Adds an adapter to the transformers model `net`; only the adapter is trained. adapter: a RunConfig

    A new adapter does not change the output, because one of its two matrices is zero. If the reference starts from an
    adapter or is updated, a second, frozen adapter serves as the reference.
    """
    torch.manual_seed(adapter.seed)
    if adapter.lora_init_from:
        net = open_adapter(net, adapter.lora_init_from, "lora_init_from", trainable=True)
    else:
        net = new_adapter(net, adapter)
    if adapter.reference_adapter:
        net.add_adapter(REFERENCE, net.peft_config[POLICY])
        copy_weights(adapter_weights(net, POLICY), adapter_weights(net, REFERENCE))
        net.set_adapter(POLICY)
    return net


def new_adapter(net, adapter):
    """Adds a new adapter to the layers that lora_targets names."""
    peft = require("peft", adapter.adapter_setting)
    left_out = None
    if adapter.lora_targets == ALL_LINEAR:
        named = adapter.adapter_setting
        targets = ALL_LINEAR
        if net.config.model_type == MAMBA:
            left_out = ["out_proj"]
    else:
        named = f"lora_targets={adapter.lora_targets!r}"
        targets = [name.strip() for name in adapter.lora_targets.split(",")]
        layers = [f".{name}" for name, _ in net.named_modules()]
        for name in targets:
            if not any(layer.endswith(f".{name}") for layer in layers):  # peft would silently skip it
                raise Mistake(f"{named} names layers that the model does not have ({name}); name linear layers, as in "
                              "q_proj,v_proj")
    settings = peft.LoraConfig(
        r=adapter.lora_rank,
        lora_alpha=adapter.lora_alpha or 2.0 * adapter.lora_rank,
        lora_dropout=0.0,
        target_modules=targets,
        exclude_modules=left_out)
    with others(f"{named} does not fit the model", "name linear layers of it", quiet=True):
        net = peft.get_peft_model(net, settings, POLICY)
    check_tied_weights(net, named)
    return net


def open_adapter(net, path, key, trainable=False):
    """Adds the adapter of a folder or hub name, stored as safetensors. Raises Mistake if it was not trained on this
    model."""
    named = f"{key}={path}"
    name = local_name(path)
    say_opening(path, key)
    peft = require("peft", named)
    find = require("transformers", named).utils.cached_file
    with others(f"{named} is not an adapter of this model", "name a folder with adapter_config.json and "
                f"{WEIGHTS} that was trained on it", quiet=True):
        file = find(name, WEIGHTS)
        net = peft.PeftModel.from_pretrained(
            net,
            name,
            POLICY,
            is_trainable=trainable)
        with safe_open(file, "pt") as f:
            saved = set(f.keys())
    weights = adapter_weights(net, POLICY)
    if weights.keys() != saved or net.peft_config[POLICY].bias != "none":
        raise Mistake(f"{named} is not an adapter of this model with LoRA's two matrices and nothing else; name one "
                      "that was trained on it")
    check_tied_weights(net, named)
    check_finite(weights.items(), named)
    return net


def check_tied_weights(net, named):
    """Raises Mistake if an adapter is on tied weights: merging it into one layer would also change the other layer."""
    base = net.get_base_model()
    embedding = base.get_input_embeddings()
    output = base.get_output_embeddings()
    if output is None or embedding.weight is not output.weight:
        return
    for layer in (embedding, output):
        if any("lora_" in name for name, _ in layer.named_parameters()):
            raise Mistake(f"{named} adapts the embedding or the output layer, which share their weights (tied "
                          "embeddings): the adapter cannot be merged into them; choose other layers")


def save_adapter(net, weights, folder):
    """Writes a folder that peft can open. weights: the trained weights, as adapter_weights returns them"""
    net.peft_config[POLICY].save_pretrained(folder)
    stored = {}
    for name, x in weights.items():
        stored[name] = x.detach().contiguous()
    path = os.path.join(folder, WEIGHTS)
    save_file(stored, path, metadata={"format": "pt"})


def adapter_weights(net, name):
    """Returns the weights of one adapter: {name in peft's files: tensor}; {} for None, no adapter."""
    own = re.compile(rf"(\.lora_(?:embedding_)?[AB])\.{name}(?=\.|$)")  # for embeddings, the adapter name comes last
    found = {}
    for key, p in net.named_parameters():
        if own.search(key):
            found[own.sub(r"\1", key)] = p
    return found


@torch.no_grad()
def copy_weights(source, target):
    """Copies the values of `source` into the tensors of `target`, both {name: tensor}."""
    for name, p in target.items():
        p.copy_(source[name])


@torch.no_grad()
def adapter_identity(net):
    """Returns plain values that identify the base model and the scale of the adapter.

    A saved state holds only the adapter, so it would load with any base model of the same shape. The values are the
    adapter's scale, which no weight contains, and the sum of the first SUMMED elements of every base weight. The
    elements are rounded to bfloat16, because a run may resume with its base model in another precision.
    """
    first = []
    for name, p in net.get_base_model().named_parameters():
        if "lora_" not in name and p.is_floating_point():
            values = gathered_state(p).flatten()
            first.append(values[:SUMMED].bfloat16())
    total = torch.cat(first).cpu().double().sum()  # MPS has no float64
    scale = net.peft_config[POLICY].lora_alpha
    return {
        "lora_alpha": float(scale),
        BASE: round(float(total), 6)}


@contextmanager
def using(net, name):
    """Within the block, the model uses the adapter `name`, or none for None."""
    if name == POLICY:
        yield
    elif name is None:
        with net.disable_adapter():
            yield
    else:
        net.set_adapter(name)
        try:
            yield
        finally:
            net.set_adapter(POLICY)
