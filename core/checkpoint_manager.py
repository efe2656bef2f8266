"""The checkpoints of a run: written whole or not at all, read without pickle.

The state that a run resumes from is one file, state.pt: plain tensors and values, loaded with weights_only=True. The
states before it are state-<step>.pt. The model beside it is enough to use what was trained: a file of ours, or a folder
in Hugging Face format.
"""

import contextlib
import os
import pickle
import re
import shutil
import struct
import tarfile
import zipfile

import torch

from core.whole_files import CannotWrite, flush, replacing

STATE, OLDER = "state.pt", re.compile(r"state-\d+\.pt")
DAMAGE = (ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, OSError,
          RuntimeError, TypeError, ValueError, pickle.PickleError, struct.error, tarfile.TarError,
          zipfile.BadZipFile)  # what zipfile and torch raise for files that are not what they should be
KEYS = {"step": int, "facts": dict, "layout": dict, "model": dict, "optimizers": list}  # what every state has


class Damaged(ValueError):
    """The file is not a whole state."""


def states(out_dir):
    """The paths of the states in a folder, the newest first."""
    names = [name for name in (os.listdir(out_dir) if os.path.isdir(out_dir) else ()) if OLDER.fullmatch(name)]
    names.sort(key=lambda name: (len(name), name), reverse=True)
    newest = [STATE] if os.path.exists(os.path.join(out_dir, STATE)) else []
    return [os.path.join(out_dir, name) for name in newest + names]


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
    keep_states: the states to keep, state.pt among them
    """

    def __init__(self, out_dir, write_model, keep=0, suffix=".safetensors", identity=None, keep_states=2):
        self.out_dir, self.write_model, self.keep, self.suffix = out_dir, write_model, keep, suffix
        self.identity, self.keep_states = identity or {}, keep_states
        self.last_good = None  # (path, step) of the last state that this process has written, or read

    def path(self, name):
        return os.path.join(self.out_dir, name)

    def save(self, step, weights, optimizers, facts, **state):
        """Writes the models, then the state, so that a state never has an older model beside it.

        weights: {name: tensor}; facts: plain values that describe the model; state: whatever else `load` returns
        """
        names = [f"model{self.suffix}"] + ([f"model-{step:06d}{self.suffix}"] if self.keep else [])
        for name in names:
            self.write_model(self.path(name), step=step, **facts)
        state |= {"step": step, "facts": facts, "layout": layout(weights, optimizers), "model": weights,
                  "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        if self.identity:
            state["identity"] = self.identity
        with replacing(self.path(STATE)) as new:
            with open(new, "wb") as f:  # an error of this file has the number of the system's, torch's own has not
                torch.save(state, f)
            flush(new)
            if self.keep_states > 1 and self.last_good and self.last_good[0] == self.path(STATE):
                os.replace(self.path(STATE), self.path(f"state-{self.last_good[1]:06d}.pt"))
        self.last_good = self.path(STATE), step
        for old in states(self.out_dir)[self.keep_states :]:
            os.remove(old)
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
        return bool(states(self.out_dir))

    def way_on(self):
        """How a run that has to end can go on, in words."""
        if not self.last_good:  # this process has saved none, but rank 0 may have
            found = states(self.out_dir)
            return f"go on with resume=True from {found[0]}" if found else "start again: no state has been saved"
        path, step = self.last_good
        return f"go on with resume=True from {path}, the last good state (step {step})"

    @contextlib.contextmanager
    def keeping(self):
        """Where the block cannot write a file, the error also names the last state."""
        try:
            yield
        except CannotWrite as error:
            raise CannotWrite(f"{error}; make room or make it writable, then {self.way_on()}") from None

    def load(self, weights, optimizers, say=print):
        """Restores the optimizers in place and returns what else was saved, the weights under "model". A damaged state
        is named, and the one before it is used.

        weights: {name: tensor} of the run that resumes; only their names and shapes are read
        """
        paths, damaged = states(self.out_dir), []
        if not paths:
            raise FileNotFoundError(f"resume=True, but {self.path(STATE)} does not exist; start without resume or "
                                    "correct out_dir")
        for path in paths:
            try:
                state = self.restore(path, weights, optimizers)
            except Damaged as error:
                damaged.append(f"{path} is damaged or cut short ({error})")
                continue
            if damaged:
                say(f"{'; '.join(damaged)}; going on from {path}, step {state['step']}")
            self.last_good = path, state["step"]
            return state
        raise ValueError(f"{'; '.join(damaged)}; start without resume")

    def restore(self, path, weights, optimizers):
        """One state as `load` returns it. Raises Damaged, or ValueError for a state of another run."""
        state = read_state(path)
        saved = state.pop("identity", {})  # a model that is trained whole has none
        for key, now in self.identity.items():
            if saved.get(key, now) != now:
                raise ValueError(f"{path} is of a run with {key}={saved[key]!r}, not {now!r}; resume with the settings "
                                 f"of {self.path('config.json')} or choose another out_dir")
        if state.pop("layout") != layout(weights, optimizers):
            raise ValueError(f"{path} is of a run with another model or optimizer; resume with the settings of "
                             f"{self.path('config.json')} or choose another out_dir")
        if shapes(state["model"]) != shapes(weights) or len(state["optimizers"]) != len(optimizers):
            raise Damaged("its tensors are not those that it lists")
        for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
            try:
                optimizer.load_state_dict(saved)
            except DAMAGE as error:
                raise Damaged(reason(error)) from None
        return state


def read_state(path):
    """The content of a state. Raises Damaged."""
    try:
        with zipfile.ZipFile(path) as parts:
            if changed := parts.testzip():  # torch does not compare what it reads with the sums of the file
                raise Damaged(f"{changed} has changed")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise Damaged("not only tensors and plain values") from None
    except Damaged:
        raise
    except DAMAGE as error:
        raise Damaged(reason(error)) from None
    if not isinstance(state, dict):
        raise Damaged(f"a {type(state).__name__} instead of named values")
    wrong = [key for key, kind in KEYS.items() if not isinstance(state.get(key), kind)]
    if not wrong and not all(map(torch.is_tensor, state["model"].values())):
        wrong = ["model"]
    if not isinstance(state.get("identity", {}), dict):
        wrong.append("identity")
    if wrong:
        raise Damaged(f"without a valid {wrong[0]}")
    return state


def reason(error):
    return (str(error).splitlines() or [""])[0][:100] or type(error).__name__
