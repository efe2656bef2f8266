"""LoRA (arXiv 2106.09685): small trainable matrices beside frozen weights, by the library peft."""

import hashlib
import re
from contextlib import contextmanager

import safetensors
import torch

from core.huggingface.settings import ALL_LINEAR
from core.performance.sharding import whole
from core.settings.optional import local_name, require
from core.settings.ranges import check_finite, shown
from core.settings.user_code import guarded

BASE = "the base model's weights (generator_checkpoint or init_from), as a hash"
HASHED = 64  # numbers of each frozen weight that the hash is made of
ADAPTER_SECONDS = 60  # of the processor, to put an adapter beside its model: its file can name regular expressions
UNSUPPORTED = ("use_dora", "bias", "modules_to_save", "trainable_token_indices", "layer_replication", "use_qalora")
POLICY, REFERENCE = "default", "reference"  # names of the adapter that is trained and of the frozen copy beside it


def add_adapter(net, adapter):
    """The transformers model `net` with an adapter, the only part of it that is trained. adapter: a LoraConfig

    A new adapter changes nothing yet: one of its two matrices is zero. With lora_init_from it is read from there. If
    the run has a reference that starts from an adapter or moves, a second, frozen adapter is the reference.
    """
    peft = require("peft", adapter.asked_for)
    torch.manual_seed(getattr(adapter, "seed", 0))
    if adapter.lora_init_from:
        net = read_adapter(net, adapter.lora_init_from)
    else:
        check_targets(net, adapter)
        settings = peft.LoraConfig(r=adapter.lora_rank, lora_alpha=adapter.alpha, target_modules=adapter.targets,
                                   lora_dropout=0.0)
        with guarded(f"lora_targets={adapter.lora_targets!r} does not fit the model", "use 'all-linear' or names of "
                     "its linear layers"):
            net = peft.get_peft_model(net, settings, POLICY)
        check_tied(net, f"lora_targets={adapter.lora_targets!r}")
    if adapter.reference_adapter:
        net.add_adapter(REFERENCE, net.peft_config[POLICY])
        load_adapter_weights(net, REFERENCE, adapter_weights(net, POLICY))
        net.set_adapter(POLICY)
    return net


def check_targets(net, adapter):
    """Raises ValueError if a name in lora_targets is none of the model's layers."""
    if adapter.targets == ALL_LINEAR:
        return
    layers = dict(net.named_modules())
    linear = {name.split(".")[-1] for name, layer in layers.items()
              if isinstance(layer, torch.nn.Linear) or type(layer).__name__ == "Conv1D"}
    for name in adapter.targets:
        if not any(f".{layer}".endswith(f".{name}") for layer in layers):
            raise ValueError(f"lora_targets={adapter.lora_targets!r} does not fit the model, which has no layer {name}"
                             f"; use 'all-linear' or names of its linear layers: {', '.join(sorted(linear))}")


def check_tied(net, named):
    """Raises ValueError if a layer with an adapter shares its weights with another one (tied embeddings): merged into
    them, the adapter would also change the other layer. named: the setting and its value, for the error"""
    base = net.get_base_model()
    if not hasattr(base, "get_output_embeddings") or base.get_output_embeddings() is None:
        return
    pair = base.get_input_embeddings(), base.get_output_embeddings()
    if pair[0].weight is not pair[1].weight:
        return
    for name, layer in base.named_modules():
        if layer in pair and hasattr(layer, "lora_A"):
            raise ValueError(f"{named}: the model reads and writes tokens with the same weights (tied embeddings), so "
                             f"an adapter of {name} cannot be merged into them; choose other layers")


def read_adapter(net, path):
    """The model with the adapter of a folder or hub name, to be trained further.

    The base model that the adapter names need not be this one, which may be a copy or a fine-tuned version of it, but
    its architecture (model_type) must be this one's, if it can be found.
    """
    net = open_adapter(net, path, "lora_init_from", trainable=True)
    base = net.peft_config[POLICY].base_model_name_or_path
    types = [model_type(name) for name in (base, net.get_base_model().config.name_or_path)]
    if None not in types and types[0] != types[1]:
        raise ValueError(f"lora_init_from={path} is not an adapter of this model: it was trained on {base}, a model of "
                         f"type {types[0]}, not {types[1]}")
    return net


def open_adapter(net, path, key, trainable=False):
    """The model with the adapter of a folder or hub name, which must be one of this model, in safetensors.

    key: the setting that names it, for errors
    """
    named, name = f"{key}={path}", local_name(path)
    peft = require("peft", named)
    with guarded(f"{named} is not an adapter of this model", "name a folder with adapter_config.json and "
                 "adapter_model.safetensors that was trained on it", ADAPTER_SECONDS):
        check_kind(peft.PeftConfig.from_pretrained(name), named)
        file = require("transformers", named).utils.cached_file(name, "adapter_model.safetensors")
        net = peft.PeftModel.from_pretrained(net, name, POLICY, is_trainable=trainable)
        with safetensors.safe_open(file, "pt") as f:
            apart = sorted(adapter_weights(net, POLICY).keys() ^ set(f.keys()))
            check_finite(((key, f.get_tensor(key)) for key in f.keys()), named)
    if apart:
        raise ValueError(f"{named} is not an adapter of this model: {apart[0]} is in only one of the two; name one "
                         "that was trained on it")
    check_tied(net, named)
    return net


def check_kind(settings, named):
    """Raises ValueError for an adapter that is more than LoRA's two matrices beside linear layers.

    settings: its PeftConfig; named: the setting and the path, for the error
    """
    if settings.peft_type != "LORA":
        raise ValueError(f"{named} is an adapter of kind {settings.peft_type}; only LoRA adapters are supported")
    for option in UNSUPPORTED:
        value = getattr(settings, option, None)
        if value and value != "none":
            raise ValueError(f"{named} is an adapter with {option}={shown(value)}, which is not supported: only the "
                             "two matrices of LoRA beside linear layers are; train one without it")


def model_type(name):
    """The architecture of the model in a folder, or of one from the hub that was downloaded before; else None."""
    config = require("transformers", f"the base model {name}").PretrainedConfig
    try:
        return config.get_config_dict(name or "", local_files_only=True)[0].get("model_type")
    except OSError:
        return None


def adapter_weights(net, name):
    """{name of the weight: tensor} of one adapter; the same names for every adapter, none for no adapter (None)."""
    if name is None:
        return {}
    return {key: p for key, _, p in adapter_parameters(net, name)}


def adapter_parameters(net, name):
    """Yields (name of the weight, its name in peft's model, the parameter) of one adapter."""
    own = re.compile(rf"(\.lora_\w+)\.{name}(?=\.|$)")  # embeddings have nothing behind the adapter's name
    for key, p in net.named_parameters():
        if own.search(key):
            yield own.sub(r"\1", key), key, p


def peft_names(net, weights):
    """Weights of the trained adapter, {name: tensor} as adapter_weights gave them, with their names in peft's model."""
    return {key: weights[name] for name, key, _ in adapter_parameters(net, POLICY)}


@torch.no_grad()
def load_adapter_weights(net, name, weights):
    """Copies weights that adapter_weights gave into one adapter."""
    own = adapter_weights(net, name)
    assert own.keys() == weights.keys(), f"{sorted(own.keys() ^ weights.keys())[:3]}"
    for key, p in own.items():
        p.copy_(weights[key])


def adapter_identity(net):
    """What must be equal for saved weights of the trained adapter to give the same model, as plain values: besides the
    adapter, its scale and the weights that it is added to."""
    settings, base = net.peft_config[POLICY], net.get_base_model()
    layers = {name.split(".lora_")[0].split(".")[-1] for name in adapter_weights(net, POLICY)}
    return {"lora_rank": settings.r, "lora_alpha": float(settings.lora_alpha), "lora_targets": sorted(layers),
            "load_in_4bit": bool(getattr(base, "is_loaded_in_4bit", False)), BASE: base_hash(base)}


@torch.no_grad()
def base_hash(net):
    """A hash of the first numbers of every weight that is not an adapter's, the same in float32 and in bfloat16."""
    first = [whole(p).flatten()[:HASHED].to(torch.bfloat16) for name, p in net.named_parameters()
             if "lora_" not in name and p.is_floating_point()]
    return hashlib.sha256(torch.cat(first).float().cpu().numpy().tobytes()).hexdigest()[:16]


def without_adapter(layers):
    """The weights of a model's layers that no adapter changes: (their share, the name of the largest).

    layers: those of the model, without embeddings and output layers
    """
    adapted = {id(p) for layer in layers.modules() if hasattr(layer, "lora_A") for p in layer.parameters()}
    weights = [(name, p) for name, p in layers.named_parameters() if p.dim() > 1 and "lora_" not in name]
    fixed = {name: p.numel() for name, p in weights if id(p) not in adapted}
    share = sum(fixed.values()) / max(1, sum(p.numel() for _, p in weights))
    return share, max(fixed, key=fixed.get, default="")


@contextmanager
def using(net, name):
    """Within, the model computes with the adapter of that name, or with None without one."""
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
