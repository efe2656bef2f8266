"""The checkpoints of a run: written whole or not at all, read without pickle.

The state that a run resumes from is one file, state.pt: plain tensors and values, loaded with weights_only=True. The
states before it are state-<step>.pt. The model beside it is enough to use what was trained: a file of ours, or a folder
in Hugging Face format.
"""

import contextlib
import errno
import os
import pickle
import re
import shutil
import struct
import tarfile
import zipfile

import torch

from core.files.whole_files import CannotWrite, flush, replacing, writing
from core.performance.sharding import cut_state, is_sharded, whole
from core.run.names import CONFIG, METRICS, OLDER, SAMPLES, STATE
from core.settings.ranges import check_finite
from core.settings.user_code import one_line

DAMAGE = (ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, RuntimeError, TypeError,
          ValueError, pickle.PickleError, struct.error, tarfile.TarError,
          zipfile.BadZipFile)  # what zipfile and torch raise for files that are not what they should be
RECORDS = (METRICS, SAMPLES)  # what a run writes line by line
OTHER_FACTS = ("step", "path", "weights", "model", "tokenizer", "dtype")  # of a model, beside its held-out figures
MOST_STEPS = 10**15  # no run has more
KEPT = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}  # by an optimizer, of a parameter
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

    write_model(path, **facts): writes the model as it is now, whole or not at all; if it is sharded, it also gets its
        `weights`
    suffix: the ending of a model's name: ".safetensors" of a file, "" of a folder in Hugging Face format
    identity: {setting: plain value} that must be equal for a state to fit, beside the names and shapes of the weights
    keep_states: the states to keep, state.pt among them
    writes: whether this process writes; one that does not takes part in putting sharded tensors together
    write_card(folder, step, before, after): describes a model that is a folder; before, after: held-out figures
    """

    def __init__(self, out_dir, write_model, keep=0, suffix=".safetensors", identity=None, keep_states=2, writes=True,
                 write_card=None):
        self.out_dir, self.write_model, self.keep, self.suffix = out_dir, write_model, keep, suffix
        self.identity, self.keep_states, self.writes = identity or {}, keep_states, writes
        self.write_card = write_card
        self.last = None  # (path, step) of the last state that this process has written, or read
        self.damaged = []  # the paths of damaged older states, until a whole one is saved

    def path(self, name):
        return os.path.join(self.out_dir, name)

    def save(self, step, weights, optimizers, facts, **state):
        """Writes the models, then the state, so that a state never has an older model beside it.

        weights: {name: tensor}; facts: plain values that describe the model; state: whatever else `load` returns
        If tensors are sharded, every rank must call it.
        """
        state |= {"step": step, "facts": facts, "layout": layout(weights, optimizers), "model": weights,
                  "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        if (state := whole(state, self.writes)) is None:
            return
        together = {"weights": state["model"]} if any(map(is_sharded, weights.values())) else {}
        names = [f"model{self.suffix}"] + ([f"model-{step:06d}{self.suffix}"] if self.keep else [])
        for name in names:
            self.write_model(self.path(name), **together, step=step, **facts)
            if self.write_card is not None and os.path.isdir(self.path(name)):
                self.write_card(self.path(name), step, state.get("before", {}), facts)
        if self.identity:
            state["identity"] = self.identity
        for path in filter(os.path.exists, map(self.path, RECORDS)):  # after a power cut no state is ahead of them
            with writing(path):
                flush(path)
        with replacing(self.path(STATE)) as new:
            with open(new, "wb") as f:  # an error of this file has the number of the system's, torch's own has not
                torch.save(state, f)
            flush(new)
            if self.keep_states > 1 and self.last and self.last[0] == self.path(STATE):
                os.replace(self.path(STATE), self.path(f"state-{self.last[1]:06d}.pt"))
        self.last = self.path(STATE), step
        for path in filter(os.path.exists, self.damaged):  # they must not take the place of whole ones
            os.remove(path)
        self.damaged = []
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

    def how_to_go_on(self, good=False):
        """How a run that has to end can go on, in words. good: whether no state is saved after a bad step."""
        found = states(self.out_dir)
        if not found and not self.last:
            return "start again: no state has been saved"
        path, step = self.last or (found[0], None)  # this process may have saved none, but rank 0 has
        which = "" if step is None else f", the last {'good ' * good}state (step {step})"
        older = found[found.index(path) + 1 :] if good and path in found else []
        return f"go on with resume=True from {path}{which}" + (
            f"; if it fails again, delete that one, and the run goes on from {older[0]}" if older else "")

    @contextlib.contextmanager
    def keeping(self):
        """Where the block cannot write a file, the error also names the last state."""
        try:
            yield
        except CannotWrite as error:
            raise CannotWrite(f"{error}; make room or make it writable, then {self.how_to_go_on()}") from None

    def load(self, weights, optimizers, say=print):
        """Restores the optimizers in place and returns what else was saved, the weights under "model". A damaged state
        is named, and the one before it is used.

        weights: {name: tensor} of the run that resumes; only their names and shapes are read
        """
        paths, damaged, self.damaged = states(self.out_dir), [], []
        if not paths:
            raise FileNotFoundError(f"resume=True, but {self.path(STATE)} does not exist; start without resume or "
                                    "correct out_dir")
        for path in paths:
            try:
                state = self.restore(path, weights, optimizers)
            except Damaged as error:
                damaged.append(f"{path} is damaged or cut short ({error})")
                self.damaged += [path] * (path != self.path(STATE))  # the next save replaces this one
                continue
            if damaged:
                say(f"{'; '.join(damaged)}; going on from {path}, step {state['step']}")
            self.last = path, state["step"]
            return state
        raise ValueError(f"{'; '.join(damaged)}; start without resume")

    def restore(self, path, weights, optimizers):
        """One state as `load` returns it. Raises Damaged, or ValueError for a state of another run."""
        state = read_state(path, mapped=any(map(is_sharded, weights.values())))
        saved = state.pop("identity", {})  # a model that is trained whole has none
        for key, now in self.identity.items():
            if saved.get(key, now) != now:
                raise ValueError(f"{path} is of a run with {key}={saved[key]!r}, not {now!r}; resume with the settings "
                                 f"of {self.path(CONFIG)} or choose another out_dir")
        if state.pop("layout") != layout(weights, optimizers):
            raise ValueError(f"{path} is of a run with another model or optimizer; resume with the settings of "
                             f"{self.path(CONFIG)} or choose another out_dir")
        if shapes(state["model"]) != shapes(weights) or len(state["optimizers"]) != len(optimizers):
            raise Damaged("its tensors are not those that it lists")
        for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
            own = [{key: x for key, x in group.items() if key != "params"} for group in optimizer.param_groups]
            try:
                cut_state(saved, optimizer)
                optimizer.load_state_dict(saved)
            except torch.OutOfMemoryError:
                raise
            except DAMAGE as error:
                raise Damaged(one_line(error)) from None
            for group, options in zip(optimizer.param_groups, own, strict=True):
                group.update(options)  # those of this run's settings, whatever the file has
            check_optimizer(optimizer)
        return state


def read_state(path, mapped=False):
    """The content of a state. Raises Damaged.

    mapped: whether its tensors stay in the file until they are read, so that the ranks of a machine share the memory
    """
    try:
        with zipfile.ZipFile(path) as parts:
            if changed := parts.testzip():  # torch does not compare what it reads with the sums of the file
                raise Damaged(f"{changed} has changed")
            mapped = mapped and all(part.compress_type == zipfile.ZIP_STORED for part in parts.infolist())
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError:
        raise Damaged("not only tensors and plain values") from None
    except Damaged:
        raise
    except OSError as error:
        if error.errno == errno.EINVAL:  # zipfile goes to a place before the beginning of a file that was cut
            raise Damaged(one_line(error)) from None
        raise ValueError(f"{path} cannot be read ({error.strerror or error}); make it readable, then go on with "
                         "resume=True") from None
    except MemoryError:
        raise ValueError(f"{path} does not fit into the memory; make room, then go on with resume=True") from None
    except DAMAGE as error:
        if "allocate memory" in str(error):  # torch's own MemoryError
            raise ValueError(f"{path} does not fit into the memory; make room, then go on with resume=True") from None
        raise Damaged(one_line(error)) from None
    if not isinstance(state, dict):
        raise Damaged(f"a {type(state).__name__} instead of named values")
    wrong = [key for key, kind in KEYS.items() if not isinstance(state.get(key), kind)]
    if not wrong and not all(map(torch.is_tensor, state["model"].values())):
        wrong = ["model"]
    if not wrong and not 0 <= state["step"] <= MOST_STEPS:
        wrong = ["step"]
    if not isinstance(state.get("identity", {}), dict):
        wrong.append("identity")
    if not wrong and not all(map(is_fact, state["facts"].items())):
        wrong = ["facts"]
    if wrong:
        raise Damaged(f"without a valid {wrong[0]}")
    try:
        check_finite(state["model"].items(), "the model")
    except ValueError as error:
        raise Damaged(str(error).partition(";")[0]) from None
    return state


def is_fact(item):
    """Whether a name and a value are those of a held-out figure."""
    name, value = item
    if not isinstance(name, str) or name in OTHER_FACTS:
        return False
    return isinstance(value, float) or (isinstance(value, int) and abs(value) <= MOST_STEPS)


def check_optimizer(optimizer):
    """Raises Damaged if what an optimizer has loaded is not of the names and shapes that its next step needs."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept = optimizer.state.get(p, {})
            if not isinstance(kept, dict) or kept and set(kept) != KEPT.get(type(optimizer).__name__, set(kept)):
                raise Damaged("the state of an optimizer lacks a part, or has one of another optimizer")
            for name, x in kept.items():
                if not torch.is_tensor(x) or x.shape != (() if name == "step" else p.shape):
                    raise Damaged(f"{name} of an optimizer has not the shape of its parameter")
