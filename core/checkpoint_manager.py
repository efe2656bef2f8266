"""Checkpoints: written whole or not at all, read without pickle, each model file enough to use the model.

A model is a safetensors file whose header carries its GPTConfig, its tokenizer and where it came from. The state that a
run resumes from is one file, state.pt: plain tensors and values, loaded with weights_only=True.
"""

import dataclasses
import json
import os
import pickle

import safetensors
import torch
from safetensors.torch import save_file

from core.model import GPT, GPTConfig, bare
from core.tokenizer import from_description

STATE, MODEL = "state.pt", "model.safetensors"
RECIPES = {"judge_checkpoint": "judge", "gold_judge_checkpoint": "gold_judge", "init_from": "trunk"}


def save_model(path, model, tokenizer, dtype=torch.float32, **facts):
    """Writes weights, config, tokenizer and plain facts (step, metrics) to one safetensors file, atomically."""
    model = bare(model)
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

    mode: what it has to be; tokenizer: the one that its vocabulary has to equal
    Returns (model, facts). Raises FileNotFoundError or ValueError naming `key`, the file and what was found in it.
    """
    header = read_header(path, key)
    config = GPTConfig(**header["config"])
    if mode is not None and config.mode != mode:
        raise ValueError(f"{key}={path} has mode {config.mode}, but {mode} is needed here")
    if tokenizer is not None and header["tokenizer"] != tokenizer.description():
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
    """For a reference or a judge: no gradients, no dropout."""
    return model.requires_grad_(False).eval()


def set_aside(out_dir):
    """Moves the files of an earlier run in this folder to <out_dir>/previous; those of the run before it are given up.

    Returns whether there was one.
    """
    inside = os.listdir(out_dir) if os.path.isdir(out_dir) else []
    files = [name for name in inside if os.path.isfile(os.path.join(out_dir, name))]
    for name in files:
        os.makedirs(os.path.join(out_dir, "previous"), exist_ok=True)
        os.replace(os.path.join(out_dir, name), os.path.join(out_dir, "previous", name))
    return bool(files)


def layout(model, optimizers):
    """What has to be equal for a saved state to fit: names and shapes of the weights, kinds of the optimizers."""
    shapes = {name: list(p.shape) for name, p in bare(model).state_dict().items()}
    return {"weights": shapes, "optimizers": [type(optimizer).__name__ for optimizer in optimizers]}


class CheckpointManager:
    """<out_dir>/state.pt to resume from, <out_dir>/model.safetensors to use; with keep, also the last `keep` models."""

    def __init__(self, out_dir, keep=0):
        self.out_dir, self.keep = out_dir, keep

    def path(self, name):
        return os.path.join(self.out_dir, name)

    def save(self, step, model, optimizers, tokenizer, facts, **state):
        """facts: plain values that describe the model; state: whatever else `load` should give back."""
        os.makedirs(self.out_dir, exist_ok=True)
        state |= {"step": step, "facts": facts, "layout": layout(model, optimizers), "model": bare(model).state_dict(),
                  "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        torch.save(state, self.path(STATE + ".tmp"))
        os.replace(self.path(STATE + ".tmp"), self.path(STATE))
        save_model(self.path(MODEL), model, tokenizer, step=step, **facts)
        if self.keep:
            save_model(self.path(f"model-{step:06d}.safetensors"), model, tokenizer, step=step, **facts)
            for old in sorted(f for f in os.listdir(self.out_dir) if f.startswith("model-"))[: -self.keep]:
                os.remove(self.path(old))

    def exists(self):
        return os.path.exists(self.path(STATE))

    def load(self, model, optimizers):
        """Restores model and optimizers in place and returns the rest of what was saved."""
        path = self.path(STATE)
        if not self.exists():
            raise FileNotFoundError(f"resume=True, but {path} does not exist; start without resume or correct out_dir")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise ValueError(f"{path} is damaged or cut short ({str(error).splitlines()[0]}); "
                             "start without resume") from None
        if state.pop("layout", None) != layout(model, optimizers):
            raise ValueError(f"{path} is of a run with another model or optimizer; resume with the settings of "
                             f"{self.path('config.json')} or choose another out_dir")
        bare(model).load_state_dict(state.pop("model"))
        for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
            optimizer.load_state_dict(saved)
        return state
