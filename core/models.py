"""Models and tokenizers of every kind: a model file of ours, a folder in Hugging Face format, or hf:owner/name.

The only place that asks whose model it is. What Hugging Face models need is imported where one is used. A model file is
a safetensors file whose header holds the GPTConfig, the tokenizer and facts about the training.
"""

import dataclasses
import json
import os

import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from core.errors import Mistake, described, others
from core.files import HUB, object_from_json, on_hub, read_object, replacing
from core.model import GPT, GPTConfig, freeze
from core.settings.setting import check_finite
from core.tokenizer import from_description, same_vocabulary

AGAIN = "copy or train it again"


def is_huggingface(path, key="checkpoint"):
    """Tells whether the path names a Hugging Face model: hf:owner/name, or a folder that holds one. Raises Mistake
    for another folder."""
    if on_hub(path):
        return True
    if not os.path.isdir(path):
        return False
    if os.path.exists(os.path.join(path, "adapter_config.json")):
        return True
    file = os.path.join(path, "config.json")  # the folder of a run has one too, with the run's settings
    if os.path.isfile(file) and "model_type" in read_object(file, f"{key}={path}: config.json", "copy it again"):
        return True
    raise Mistake(f"{key}={path} is a folder without a Hugging Face config.json; correct the path or, of a run, "
                  f"name the model in it: {path}/model or {path}/model.safetensors")


def is_small(path):
    """Tells whether a path names a model of ours: a file, or None for a new model. They are small."""
    return path is None or os.path.isfile(path)


def load_model(path, device="cpu", mode=None, tokenizer=None, key="checkpoint", adapter=None, dtype=torch.float32):
    """A model in eval mode, and facts about its training.

    mode: the mode that it must have; tokenizer: the one whose vocabulary it must have
    adapter: a RunConfig: whether an adapter of a Hugging Face model is trained; dtype: of the weights beside it
    Raises Mistake naming `key`, the path and what was found there.
    """
    if is_huggingface(path, key):
        from core.huggingface.load import FULL, load_huggingface
        return load_huggingface(path, device, mode, tokenizer, key, adapter or FULL, dtype), {}
    if adapter is not None and adapter.has_adapter and os.path.exists(path):
        raise Mistake(f"{adapter.asked_for} is for Hugging Face models, which {key}={path} is not; leave it out")
    return read_model_file(path, device, mode, tokenizer, key)


def freeze_in(dtype, model):
    """The frozen model of a run that computes in dtype. Its linear layers hold the weights that autocast would multiply
    with, which leaves every product as it is; vectors and embeddings stay in float32."""
    embeddings = {part.weight for part in model.modules() if isinstance(part, nn.Embedding)}
    for part in model.modules():
        if dtype != torch.float32 and isinstance(part, nn.Linear) and part.weight not in embeddings:
            part.weight.data = part.weight.data.to(dtype)
    return freeze(model)


def load_tokenizer(path, key="checkpoint"):
    """The tokenizer of a model."""
    if not is_huggingface(path, key):
        return from_description(read_header(path, key)["tokenizer"], path)
    from core.huggingface.tokenizer import load_huggingface_tokenizer
    return load_huggingface_tokenizer(path, key)


def save_model(path, model, tokenizer, dtype=torch.float32, weights=None, **facts):
    """Writes the model with its tokenizer, whole or not at all: a file of ours, or a folder in Hugging Face format,
    which holds the adapter alone if there is one.

    facts: plain values for the header of a file of ours (step, metrics)
    weights: what model.weights() gives, whole, if the model has only parts of them; in float32
    """
    if not isinstance(model, GPT):
        from core.huggingface.load import save_huggingface
        save_huggingface(path, model, tokenizer, dtype, weights)
        return
    header = {"config": dataclasses.asdict(model.config), "tokenizer": tokenizer.description(), "facts": facts}
    weights = model.weights() if weights is None else weights
    weights = {name: p.detach().to("cpu", dtype).contiguous() for name, p in weights.items()}
    with replacing(path) as new:
        save_file(weights, new, metadata={"nano_grpo": json.dumps(header)})


def read_header(path, key):
    """The header of a model file. `key` is the setting that named it, for the error."""
    if not os.path.isfile(path):
        raise Mistake(f"{key}={path} does not exist; correct the path, train it (config/pretrain_*.py, "
                      f"--export={path}), or name a model of the hub {key}={HUB}owner/name")
    with others(f"{key}={path} is damaged or cut short", AGAIN), safetensors.safe_open(path, "pt") as f:
        text = (f.metadata() or {}).get("nano_grpo")
    if text is None:
        raise Mistake(f"{key}={path} was not written by this project; of a Hugging Face model, name the folder")
    header = object_from_json(text, f"{key}={path}: its header", AGAIN)
    if not all(isinstance(header.get(name), dict) for name in ("config", "tokenizer", "facts")):
        raise Mistake(f"{key}={path}: its header has no config, tokenizer and facts; {AGAIN}")
    return header


def read_model_file(path, device="cpu", mode=None, tokenizer=None, key="checkpoint"):
    """Rebuilds a model from its file, in eval mode and float32.

    mode: the mode that it must have; tokenizer: the one whose vocabulary it must have
    Returns (model, facts). Raises Mistake naming `key`, the file and what was found in it.
    """
    header, named = read_header(path, key), f"{key}={path}"
    header["config"].pop("prompt_attention", None)  # that of data/guess has it
    try:
        config = GPTConfig(**header["config"])
        with torch.device("meta"):  # the config may ask for more memory than there is
            wanted = {name: p.shape for name, p in GPT(config).state_dict().items()}
    except (TypeError, ValueError) as error:
        raise Mistake(f"{named}: the config in its header is damaged ({described(error)}); {AGAIN}") from None
    if mode is not None and config.mode != mode:
        raise Mistake(f"{named} has mode {config.mode}, but {mode} is needed here")
    if tokenizer is not None and not same_vocabulary(header["tokenizer"], tokenizer):
        raise Mistake(f"{named} has another vocabulary ({header['tokenizer'].get('vocab_size')} tokens) than the "
                      f"dataset or generator ({tokenizer.vocab_size}); use those of the same vocabulary")
    with safetensors.safe_open(path, "pt") as f:
        weights = {name: f.get_tensor(name).float() for name in f.keys()}
    if wanted != {name: p.shape for name, p in weights.items()}:
        raise Mistake(f"{named}: its tensors are not those that the config in its header asks for; {AGAIN}")
    check_finite(weights.items(), named)
    model = GPT(config)
    model.load_state_dict(weights)
    return model.to(device).eval(), header["facts"]
