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

from core.model import GPT, GPTConfig
from core.tokenizer import from_description, same_vocabulary

RECIPES = {"judge_checkpoint": "judge", "gold_judge_checkpoint": "gold_judge", "init_from": "trunk"}


def write_model_file(path, model, tokenizer, dtype=torch.float32, **facts):
    """Writes weights, config, tokenizer and plain facts (step, metrics) to one safetensors file, atomically."""
    header = {"config": dataclasses.asdict(model.config), "tokenizer": tokenizer.description(), "facts": facts}
    weights = {name: p.detach().to("cpu", dtype).contiguous() for name, p in model.state_dict().items()}
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    save_file(weights, path + ".tmp", metadata={"nano_grpo": json.dumps(header)})
    os.replace(path + ".tmp", path)


def read_header(path, key="checkpoint"):
    """The header of a model file. `key` is the setting that named it, for the error."""
    if not os.path.exists(path):
        kind = RECIPES.get(key, "generator")
        hub = f" (a model of the hub is hf:{path})" if re.fullmatch(r"[\w.-]+/[\w.-]+", path) else ""
        raise FileNotFoundError(f"{key}={path} does not exist{hub}; correct the path, or train it with "
                                f"python core/pretrain.py config/pretrain_{kind}.py --export={path}")
    try:
        with safetensors.safe_open(path, "pt") as f:
            return json.loads(f.metadata()["nano_grpo"])
    except safetensors.SafetensorError as error:
        raise ValueError(f"{key}={path} is damaged or cut short ({error}); copy or train it again") from None
    except (KeyError, TypeError):
        raise ValueError(f"{key}={path} is a safetensors file, but not one that this project wrote; of a Hugging Face "
                         "model, name the folder") from None


def read_model_file(path, device="cpu", mode=None, tokenizer=None, key="checkpoint"):
    """Rebuilds a model from its file, in eval mode and float32.

    mode: the mode that it must have; tokenizer: the one whose vocabulary it must have
    Returns (model, facts). Raises FileNotFoundError or ValueError naming `key`, the file and what was found in it.
    """
    header = read_header(path, key)
    config = GPTConfig(**header["config"])
    if mode is not None and config.mode != mode:
        raise ValueError(f"{key}={path} has mode {config.mode}, but {mode} is needed here")
    if tokenizer is not None and not same_vocabulary(header["tokenizer"], tokenizer, path):
        raise ValueError(f"{key}={path} has another vocabulary ({header['tokenizer'].get('vocab_size')} tokens) than "
                         f"the dataset or generator ({tokenizer.vocab_size}); "
                         "use models trained on the same vocabulary")
    model = GPT(config)
    with safetensors.safe_open(path, "pt") as f:
        model.load_state_dict({name: f.get_tensor(name).float() for name in f.keys()})
    return model.to(device).eval(), header["facts"]


def read_tokenizer(path, key="checkpoint"):
    """The tokenizer in the header of a model file."""
    return from_description(read_header(path, key)["tokenizer"], path)
