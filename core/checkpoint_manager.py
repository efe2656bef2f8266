"""The checkpoints of a run: written whole or not at all, read without pickle.

The state that a run resumes from is one file, state.pt: plain tensors and values, loaded with weights_only=True. The
model beside it is enough to use what was trained: a file of ours, or a folder in Hugging Face format.
"""

import os
import pickle
import re
import shutil

import torch

STATE = "state.pt"
MODELS = re.compile(r"model(-\d+)?(\.safetensors)?")  # the latest model and the numbered ones: files, or folders
PREVIOUS, PARTIAL = "previous", "partial"  # <out_dir>/previous/1, 2, ... are earlier runs; partial is being moved


def set_aside(out_dir):
    """Moves the files of an earlier run in this folder to <out_dir>/previous/<n>, n = 1, 2, ...; nothing is deleted.

    The files are collected in previous/partial, which gets its number at the end: a move that was interrupted goes on
    at the next call, and an earlier run stays in one folder.
    Returns the folder of the earlier run, or None if there was none.
    """
    previous, partial = os.path.join(out_dir, PREVIOUS), os.path.join(out_dir, PREVIOUS, PARTIAL)
    files = [name for name in folder_list(out_dir)
             if os.path.isfile(os.path.join(out_dir, name)) or MODELS.fullmatch(name)]
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


def shapes(weights):
    """{name: shape} of {name: tensor}, as plain values."""
    return {name: list(p.shape) for name, p in weights.items()}


def layout(weights, optimizers):
    """What must be equal for a saved state to fit: names and shapes of the weights, kinds of the optimizers."""
    return {"weights": shapes(weights), "optimizers": [type(optimizer).__name__ for optimizer in optimizers]}


class CheckpointManager:
    """<out_dir>/state.pt to resume from, <out_dir>/model<suffix> to use; with keep, also the last `keep` models.

    write_model(path, **facts): writes the model as it is now, whole or not at all
    suffix: the ending of a model's name: ".safetensors" of a file, "" of a folder in Hugging Face format
    identity: {setting: plain value} that must be equal for a state to fit, beside the names and shapes of the weights
    """

    def __init__(self, out_dir, write_model, keep=0, suffix=".safetensors", identity=None):
        self.out_dir, self.write_model, self.keep, self.suffix = out_dir, write_model, keep, suffix
        self.identity = identity or {}

    def path(self, name):
        return os.path.join(self.out_dir, name)

    def save(self, step, weights, optimizers, facts, **state):
        """Writes the models, then the state, so that a state never has an older model beside it.

        weights: {name: tensor}; facts: plain values that describe the model; state: whatever else `load` returns
        """
        os.makedirs(self.out_dir, exist_ok=True)
        names = [f"model{self.suffix}"] + ([f"model-{step:06d}{self.suffix}"] if self.keep else [])
        for name in names:
            self.write_model(self.path(name), step=step, **facts)
        state |= {"step": step, "facts": facts, "layout": layout(weights, optimizers), "model": weights,
                  "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        if self.identity:
            state["identity"] = self.identity
        torch.save(state, self.path(STATE + ".tmp"))
        os.replace(self.path(STATE + ".tmp"), self.path(STATE))
        if self.keep:
            for old in self.numbered()[: -self.keep]:
                remove = shutil.rmtree if os.path.isdir(self.path(old)) else os.remove
                remove(self.path(old))

    def numbered(self):
        """The names of the numbered models, the oldest first."""
        pattern = r"model-\d+" + re.escape(self.suffix)
        return sorted((name for name in os.listdir(self.out_dir) if re.fullmatch(pattern, name)),
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
        saved = state.pop("identity", {})  # a model that is trained whole has none
        for key, now in self.identity.items():
            if saved.get(key, now) != now:
                raise ValueError(f"{path} is of a run with {key}={saved[key]!r}, not {now!r}; resume with the settings "
                                 f"of {self.path('config.json')} or choose another out_dir")
        if state.pop("layout", None) != layout(weights, optimizers):
            raise ValueError(f"{path} is of a run with another model or optimizer; resume with the settings of "
                             f"{self.path('config.json')} or choose another out_dir")
        for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
            optimizer.load_state_dict(saved)
        return state
