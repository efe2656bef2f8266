"""Models and tokenizers of every kind: a model file of ours, a folder in Hugging Face format, or hf:owner/name.

Only this file distinguishes our models from those of Hugging Face, whose code is imported only when needed. A model
file of ours is a safetensors file whose header holds the GPTConfig, the tokenizer and facts about the training.
"""

import dataclasses
import json
import os

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from core.errors import Mistake, described, others
from core.files import HUB, STATE, object_from_json, on_hub, read_object, replacing
from core.model import GPT, GPTConfig, freeze
from core.settings.setting import check_finite
from core.tokenizer import from_description, same_vocabulary

AGAIN = "copy or train it again"


def is_huggingface(path, key="checkpoint"):
    """True if the path names a Hugging Face model: hf:owner/name, or a folder that holds one. Raises Mistake for
    another folder."""
    if on_hub(path):
        return True
    if not os.path.isdir(path):
        return False
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        return True
    file = os.path.join(path, "config.json")
    if os.path.isfile(file):
        values = read_object(file, f"{key}={path}: config.json", "copy it again")
        if "model_type" in values:  # a run's folder has a config.json too, with its settings
            return True
    raise Mistake(f"{key}={path} is a folder without a Hugging Face config.json; correct the path or, of a run, "
                  f"name the model in it: {path}/model or {path}/model.safetensors")


def model_of_run(path):
    """The path of the model in the folder of a run, which has a state; another path as it is."""
    if os.path.exists(os.path.join(path, STATE)):
        for name in ("model", "model.safetensors"):
            model = os.path.join(path, name)
            if os.path.exists(model):
                return model
    return path


def is_small(path):
    """True for a model of ours: a file, or None for a new model."""
    return path is None or os.path.isfile(path)


def load_model(
        path,
        device="cpu",
        mode=None,             # the required mode; None: any
        tokenizer=None,        # with the required vocabulary; None: any
        key="checkpoint",      # the setting that names it
        adapter=None,          # a RunConfig with the adapter settings of a Hugging Face model
        dtype=torch.float32):  # of the base weights of an adapter
    """Loads a model in eval mode, in float32, and facts about its training. Raises Mistake naming `key`, the path and
    the fault."""
    if is_huggingface(path, key):
        from core.huggingface.load import FULL, load_huggingface
        model = load_huggingface(
            path,
            device,
            mode,
            tokenizer,
            key,
            adapter or FULL,
            dtype)
        return model, {}
    named = f"{key}={path}"
    if adapter is not None and adapter.has_adapter and os.path.exists(path):
        raise Mistake(f"{adapter.adapter_setting} is for Hugging Face models, which {named} is not; leave it out")
    header = read_header(path, key)
    header["config"].pop("prompt_attention", None)  # data/guess has a file from when this was a setting
    try:
        config = GPTConfig(**header["config"])
        with torch.device("meta"):  # no memory yet: a damaged config may ask for more than there is
            empty = GPT(config)
    except (TypeError, ValueError) as error:
        raise Mistake(f"{named}: the config in its header is damaged ({described(error)}); {AGAIN}") from None
    if mode is not None and config.mode != mode:
        raise Mistake(f"{named} has mode {config.mode}, but {mode} is needed here")
    if tokenizer is not None and not same_vocabulary(header["tokenizer"], tokenizer):
        raise Mistake(f"{named} has another vocabulary ({header['tokenizer'].get('vocab_size')} tokens) than the "
                      f"dataset or generator ({tokenizer.vocab_size}); use those of the same vocabulary")
    weights = load_file(path)
    found = {name: p.shape for name, p in weights.items()}
    needed = {name: p.shape for name, p in empty.state_dict().items()}
    if found != needed:
        raise Mistake(f"{named}: its tensors are not those that the config in its header asks for; {AGAIN}")
    check_finite(weights.items(), named)
    model = GPT(config)
    model.load_state_dict(weights)  # in float32, whatever precision the file has
    return model.to(device).eval(), header["facts"]


def freeze_and_cast(dtype, model):
    """Freezes a model and casts the weights of its linear layers once, as autocast would in each call: no product
    changes. Autocast leaves vectors and embeddings in float32, and so does this."""
    if dtype == torch.float32:
        return freeze(model)
    for weight in multiplied_weights(model):
        weight.data = weight.data.to(dtype)
    return freeze(model)


def multiplied_weights(model):
    """Returns the weights of linear layers, which autocast casts for each product. An embedding reads its weight in
    float32, also one that the output layer shares, which is left out."""
    linear = {part.weight for part in model.modules() if isinstance(part, nn.Linear)}
    embeddings = {part.weight for part in model.modules() if isinstance(part, nn.Embedding)}
    return linear - embeddings


def load_tokenizer(path, key="checkpoint"):
    """Loads the tokenizer of a model."""
    if not is_huggingface(path, key):
        return from_description(read_header(path, key)["tokenizer"], path)
    from core.huggingface.tokenizer import load_huggingface_tokenizer
    return load_huggingface_tokenizer(path, key)


def save_model(
        path,
        model,
        tokenizer,
        dtype=torch.float32,
        weights=None,  # model.weights() in float32, gathered from all ranks if it is sharded; None: read from the model
        **facts):      # plain values for the header of a file of ours, or for the model card (step, metrics)
    """Writes the model with its tokenizer atomically: a file of ours, or a folder in Hugging Face format, which holds
    only the adapter if there is one."""
    if not isinstance(model, GPT):
        from core.huggingface.load import save_huggingface
        save_huggingface(path, model, tokenizer, dtype, weights, facts)
        return
    if weights is None:
        weights = model.weights()
    stored = {}
    for name, p in weights.items():
        p = p.detach().to("cpu", dtype)
        stored[name] = p.contiguous()
    header = {
        "config": dataclasses.asdict(model.config),
        "tokenizer": tokenizer.description(),
        "facts": facts}
    metadata = {"nano_grpo": json.dumps(header)}
    with replacing(path) as new:
        save_file(stored, new, metadata)


def read_header(path, key):
    """Reads the header of a model file. key: the setting that named it, for the error"""
    if not os.path.isfile(path):
        raise Mistake(f"{key}={path} does not exist; correct the path, train it (config/pretrain_*.py, "
                      f"--export={path}), or name a model of the hub {key}={HUB}owner/name")
    with others(f"{key}={path} is damaged or cut short", AGAIN):
        with safetensors.safe_open(path, "pt") as f:
            metadata = f.metadata()
    if not metadata or "nano_grpo" not in metadata:
        raise Mistake(f"{key}={path} was not written by this project; of a Hugging Face model, name the folder")
    header = object_from_json(metadata["nano_grpo"], f"{key}={path}: its header", AGAIN)
    for name in ("config", "tokenizer", "facts"):
        if not isinstance(header.get(name), dict):
            raise Mistake(f"{key}={path}: its header has no {name}; {AGAIN}")
    return header
