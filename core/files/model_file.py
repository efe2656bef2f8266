"""Model files of ours: a safetensors file whose header holds the GPTConfig, the tokenizer and facts about the training.

Written whole or not at all, read without pickle, each enough to use the model.
"""

import dataclasses
import json
import os
import re

import safetensors
import torch
from safetensors.torch import save_file

from core.files.json_text import object_from_json
from core.files.whole_files import replacing
from core.model import GPT, GPTConfig
from core.settings.optional import HUB
from core.settings.ranges import check_finite, shown
from core.settings.user_code import one_line
from core.tokenizer import from_description, same_vocabulary

AGAIN = "copy or train it again"
RECIPES = {"judge_checkpoint": "judge", "gold_judge_checkpoint": "gold_judge", "init_from": "trunk"}
REMEDIES = {"checkpoint": "name another: data/char_diffusion/pretrained/generator.safetensors",
            "fill_checkpoints": "train that generator first: config/pretrain_generator.py or config/adapt_generator.py"}


def write_model_file(path, model, tokenizer, dtype=torch.float32, weights=None, **facts):
    """Writes weights, config, tokenizer and plain facts (step, metrics) to one safetensors file, atomically.

    weights: whole ones, {name: tensor}, if the model has only parts of them
    """
    header = {"config": dataclasses.asdict(model.config), "tokenizer": tokenizer.description(), "facts": facts}
    weights = model.weights() if weights is None else weights
    weights = {name: p.detach().to("cpu", dtype).contiguous() for name, p in weights.items()}
    with replacing(path) as new:
        save_file(weights, new, metadata={"nano_grpo": json.dumps(header)})


def read_header(path, key="checkpoint"):
    """The header of a model file. `key` is the setting that named it, for the error."""
    if not os.path.exists(path):
        recipe = f"config/pretrain_{RECIPES.get(key, 'generator')}.py"
        if re.fullmatch(r"[\w.-]+/[\w.-]+(?<!\.safetensors)", path):
            raise FileNotFoundError(f"{key}={path} does not exist here; a model of the hub is {key}={HUB}{path}")
        if os.path.basename(path).startswith("adapted_"):
            recipe = f"config/adapt_{RECIPES.get(key, 'generator').removeprefix('gold_')}.py"
        remedy = REMEDIES.get(key, f"train it with python core/pretrain.py {recipe} --export={path}")
        raise FileNotFoundError(f"{key}={path} does not exist; correct the path, or {remedy}")
    if not os.path.isfile(path):  # a pipe would be waited for
        raise ValueError(f"{key}={path} is no file; {AGAIN}")
    try:
        with safetensors.safe_open(path, "pt") as f:
            text = (f.metadata() or {}).get("nano_grpo")
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{key}={path} is damaged or cut short ({one_line(error)}); {AGAIN}") from None
    if text is None:
        raise ValueError(f"{key}={path} is a safetensors file, but not one that this project wrote; of a Hugging Face "
                         "model, name the folder")
    header = object_from_json(text, f"{key}={path}: its header", AGAIN)
    for name in ("config", "tokenizer", "facts"):
        if not isinstance(header.get(name), dict):
            raise ValueError(f"{key}={path}: its header has no object {name!r}; {AGAIN}")
    return header


def read_config(header, named):
    """The GPTConfig of a header. named: the setting and the path, for errors"""
    found, known = set(header["config"]), {field.name for field in dataclasses.fields(GPTConfig)}
    if found != known:
        raise ValueError(f"{named}: the config in its header {'lacks' if known - found else 'has the unknown key'} "
                         f"{min(known - found or found - known)}; {AGAIN}")
    try:
        config = GPTConfig(**header["config"])
    except ValueError as error:
        raise ValueError(f"{named}: the config in its header is damaged: {error}; {AGAIN}") from None
    for name in ("vocab_size", "base_vocab_size"):
        if header["tokenizer"].get(name) != getattr(config, name):
            raise ValueError(f"{named}: its header has {name}={getattr(config, name)}, but its tokenizer "
                             f"{shown(header['tokenizer'].get(name))}; {AGAIN}")
    return config


def check_tensors(config, file, named):
    """Raises ValueError unless the tensors of an open file have the names and shapes that its config asks for; no
    memory is taken. named: the setting and the path, for errors"""
    found = {name: file.get_slice(name).get_shape() for name in file.keys()}
    few = dataclasses.replace(config, n_layer=min(config.n_layer, len(found) + 1))  # of more, one is not in the file
    with torch.device("meta"):
        wanted = {name: list(p.shape) for name, p in GPT(few).state_dict().items()}
    for name in sorted(wanted | found):
        if wanted.get(name) != found.get(name):
            raise ValueError(f"{named}: by the config in its header, the tensor {name} has shape {wanted.get(name)}, "
                             f"but in the file {found.get(name)}; {AGAIN}")


def read_model_file(path, device="cpu", mode=None, tokenizer=None, key="checkpoint"):
    """Rebuilds a model from its file, in eval mode and float32.

    mode: the mode that it must have; tokenizer: the one whose vocabulary it must have
    Returns (model, facts). Raises FileNotFoundError or ValueError naming `key`, the file and what was found in it.
    """
    header = read_header(path, key)
    config = read_config(header, f"{key}={path}")
    if mode is not None and config.mode != mode:
        raise ValueError(f"{key}={path} has mode {config.mode}, but {mode} is needed here")
    if tokenizer is not None and not same_vocabulary(header["tokenizer"], tokenizer):
        raise ValueError(f"{key}={path} has another vocabulary ({header['tokenizer'].get('vocab_size')} tokens) than "
                         f"the dataset or generator ({tokenizer.vocab_size}); "
                         "use models and a dataset of the same vocabulary")
    with safetensors.safe_open(path, "pt") as f:
        check_tensors(config, f, f"{key}={path}")
        model = GPT(config)
        weights = {name: f.get_tensor(name).float() for name in f.keys()}
    check_finite(weights.items(), f"{key}={path}")
    model.load_state_dict(weights)
    return model.to(device).eval(), header["facts"]


def read_tokenizer(path, key="checkpoint"):
    """The tokenizer in the header of a model file."""
    return from_description(read_header(path, key)["tokenizer"], path)
