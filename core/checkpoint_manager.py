"""Checkpoints: written whole or not at all, read without pickle, each model file enough to use the model.

A model is a safetensors file whose header holds its GPTConfig, its tokenizer and facts about its training. The state
that a run resumes from is one file, state.pt: plain tensors and values, loaded with weights_only=True.
"""

import dataclasses
import json
import os
import pickle
import re

import safetensors
import torch
from safetensors.torch import save_file

from core.model import GPT, GPTConfig
from core.tokenizer import from_description, same_vocabulary

STATE, MODEL = "state.pt", "model.safetensors"
PREVIOUS, PARTIAL = "previous", "partial"  # <out_dir>/previous/1, 2, ... are earlier runs; partial is being moved
RECIPES = {"judge_checkpoint": "judge", "gold_judge_checkpoint": "gold_judge", "init_from": "trunk"}


def save_model(path, model, tokenizer, dtype=torch.float32, **facts):
    """Writes weights, config, tokenizer and plain facts (step, metrics) to one safetensors file, atomically."""
    header = {"config": dataclasses.asdict(model.config), "tokenizer": tokenizer.description(), "facts": facts}
    weights = {name: p.detach().to("cpu", dtype).contiguous() for name, p in model.state_dict().items()}
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    save_file(weights, path + ".tmp", metadata={"nano_grpo": json.dumps(header)})
    os.replace(path + ".tmp", path)


def read_header(path, key="checkpoint"):
    """The header of a model file. `key` is the setting that named it, for the error."""
    if os.path.isdir(path):
        raise ValueError(f"{key}={path} is a folder; name the file in it, {os.path.join(path, MODEL)}")
    if not os.path.exists(path):
        kind = RECIPES.get(key, "generator")
        raise FileNotFoundError(f"{key}={path} does not exist; correct the path, or train it with "
                                f"python core/pretrain.py config/pretrain_{kind}.py --export={path}")
    try:
        with safetensors.safe_open(path, "pt") as f:
            return json.loads(f.metadata()["nano_grpo"])
    except safetensors.SafetensorError as error:
        raise ValueError(f"{key}={path} is damaged or cut short ({error}); copy or train it again") from None
    except (KeyError, TypeError):
        raise ValueError(f"{key}={path} is a safetensors file, but not one that this project wrote") from None


def load_model(path, device="cpu", mode=None, tokenizer=None, key="checkpoint"):
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


def load_tokenizer(path, key="checkpoint"):
    return from_description(read_header(path, key)["tokenizer"], path)


def freeze(model):
    """The model without gradients and dropout, as a reference or a judge."""
    return model.requires_grad_(False).eval()


def set_aside(out_dir):
    """Moves the files of an earlier run in this folder to <out_dir>/previous/<n>, n = 1, 2, ...; nothing is deleted.

    The files are collected in previous/partial, which gets its number at the end: a move that was interrupted goes on
    at the next call, and an earlier run stays in one folder.
    Returns the folder of the earlier run, or None if there was none.
    """
    previous, partial = os.path.join(out_dir, PREVIOUS), os.path.join(out_dir, PREVIOUS, PARTIAL)
    files = [name for name in folder_list(out_dir) if os.path.isfile(os.path.join(out_dir, name))]
    if set(files) & set(folder_list(partial)):  # another run has written here since the interrupted move
        os.replace(partial, next_number(previous))
    if not files and not folder_list(partial):
        return None
    os.makedirs(partial, exist_ok=True)
    for name in sorted(files, key=lambda name: name != STATE):  # the state first: no run resumes when half is moved
        os.replace(os.path.join(out_dir, name), os.path.join(partial, name))
    folder = next_number(previous)
    os.replace(partial, folder)
    return folder


def folder_list(folder):
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def next_number(folder):
    """The path of the first number above those that the folder holds."""
    numbers = [int(name) for name in folder_list(folder) if name.isdecimal()]
    return os.path.join(folder, str(1 + max(numbers, default=0)))


def layout(weights, optimizers):
    """What must be equal for a saved state to fit: names and shapes of the weights, kinds of the optimizers."""
    shapes = {name: list(p.shape) for name, p in weights.items()}
    return {"weights": shapes, "optimizers": [type(optimizer).__name__ for optimizer in optimizers]}


class CheckpointManager:
    """<out_dir>/state.pt to resume from, <out_dir>/model.safetensors to use; with keep, also the last `keep` models.

    write_model(path, **facts): writes the model as it is now to one file, atomically
    """

    def __init__(self, out_dir, write_model, keep=0):
        self.out_dir, self.write_model, self.keep = out_dir, write_model, keep

    def path(self, name):
        return os.path.join(self.out_dir, name)

    def save(self, step, weights, optimizers, facts, **state):
        """Writes the models, then the state, so that a state never has an older model beside it.

        weights: {name: tensor}; facts: plain values that describe the model; state: whatever else `load` returns
        """
        os.makedirs(self.out_dir, exist_ok=True)
        names = [MODEL] + ([f"model-{step:06d}.safetensors"] if self.keep else [])
        for name in names:
            self.write_model(self.path(name), step=step, **facts)
        state |= {"step": step, "facts": facts, "layout": layout(weights, optimizers), "model": weights,
                  "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        torch.save(state, self.path(STATE + ".tmp"))
        os.replace(self.path(STATE + ".tmp"), self.path(STATE))
        if self.keep:
            for old in self.numbered()[: -self.keep]:
                os.remove(self.path(old))

    def numbered(self):
        """The names of the numbered models, the oldest first."""
        return sorted((name for name in os.listdir(self.out_dir) if re.fullmatch(r"model-\d+\.safetensors", name)),
                      key=lambda name: (len(name), name))

    def exists(self):
        return os.path.exists(self.path(STATE))

    def load(self, weights, optimizers):
        """Restores the optimizers in place and returns what else was saved, the weights under "model".

        weights: {name: tensor} of the run that resumes; only their names and shapes are read
        """
        path = self.path(STATE)
        if not self.exists():
            raise FileNotFoundError(f"resume=True, but {path} does not exist; start without resume or correct out_dir")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged or cut short ({str(error).splitlines()[0]}); "
                             "start without resume") from None
        if state.pop("layout", None) != layout(weights, optimizers):
            raise ValueError(f"{path} is of a run with another model or optimizer; resume with the settings of "
                             f"{self.path('config.json')} or choose another out_dir")
        for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
            optimizer.load_state_dict(saved)
        return state
