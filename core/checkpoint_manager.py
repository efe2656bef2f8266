"""The checkpoints of a run: written atomically, read without pickle.

A run resumes from state.pt: plain tensors and values, loaded with weights_only=True. state-before.pt is the state
before it. The model beside them is for use: a file of ours, or a folder in Hugging Face format.
"""

import contextlib
import os
from dataclasses import is_dataclass

import torch

from core.device import values_of
from core.distributed import is_sharded
from core.errors import Mistake, others, shortest
from core.files import BEFORE, CONFIG, STATE, CannotWrite, replacing
from core.resume import earlier_runs, resume_command


def shapes(weights):
    """Returns {name: shape} for {name: tensor}, as plain values."""
    return {name: list(p.shape) for name, p in weights.items()}


def layout(weights, optimizers):
    """Returns the names and shapes of the weights and the types of the optimizers. A state must match them."""
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    return {"weights": shapes(weights), "optimizers": kinds}


def states(out_dir: str) -> list[str]:
    """Lists the paths of the states in a folder, newest first."""
    newest = os.path.join(out_dir, STATE)
    before = os.path.join(out_dir, BEFORE)
    return list(filter(os.path.exists, (newest, before)))


def no_state(out_dir):
    """Returns the Mistake of a run that cannot resume. It names an earlier run, which a failed start may have set
    aside."""
    reason = f"resume=True, but {shortest(out_dir)} has no {STATE}"
    for folder in earlier_runs(out_dir):
        if states(folder):
            command = resume_command(folder)
            return Mistake(f"{reason}; an earlier run is in {shortest(folder)}, resume it with {command}")
    return Mistake(f"{reason}; name the folder of the run with --out_dir=FOLDER, or the config file of the run")


class CheckpointManager:
    """<out_dir>/state.pt to resume from, <out_dir>/model<suffix> to use.

    write_model(path, **facts): writes the model atomically; of a sharded model, facts include the gathered `weights`
    suffix: ".safetensors" for a file, "" for a folder in Hugging Face format
    identity: {setting: plain value} that a state must match, besides the names and shapes of the weights
    writes: True in the process that writes; the others only help to gather sharded tensors
    last, last_step: the path and step of the state that this process wrote or read last
    """

    def __init__(
            self,
            out_dir,
            write_model,
            suffix=".safetensors",
            identity=None,
            writes=True):
        self.out_dir = out_dir
        self.write_model = write_model
        self.suffix = suffix
        self.identity = identity or {}
        self.writes = writes
        self.last = self.last_step = None

    def path(self, name: str) -> str:
        return os.path.join(self.out_dir, name)

    def save(self, step: int, weights: dict, optimizers: list, facts: dict, **state) -> None:
        """Writes the model, then the state, so that a state never has an older model beside it.

        weights: {name: tensor}; facts: plain values that describe the model; state: whatever else `load` returns
        If tensors are sharded, every rank must call it.
        """
        state["step"] = step
        state["facts"] = facts
        state["layout"] = layout(weights, optimizers)
        state["identity"] = self.identity
        state["model"] = weights
        state["optimizers"] = [optimizer.state_dict() for optimizer in optimizers]
        if any(map(is_sharded, weights.values())):
            from core.performance.sharding import gathered_state
            state = gathered_state(state, self.writes)
            facts = facts | {"weights": state["model"]}
        if not self.writes:
            return
        self.write_model(self.path(f"model{self.suffix}"), step=step, **facts)
        newest = self.path(STATE)
        with replacing(newest) as new:
            with open(new, "wb") as f:
                torch.save(state, f)
            # A file that this process neither wrote nor read may be damaged: it must not replace the good older state
            if self.last == newest:
                os.replace(newest, self.path(BEFORE))
        self.last = newest
        self.last_step = step

    def how_to_resume(self) -> str:
        """Returns the advice on resuming for the error of a run that has to end."""
        if self.last_step is None:
            return "no state has been saved, start again"
        return f"the last state is {self.last} (step {self.last_step}), resume with {resume_command(self.out_dir)}"

    @contextlib.contextmanager
    def keeping(self):
        """Adds the remedy to the error of a block that cannot write a file."""
        try:
            yield
        except CannotWrite as error:
            raise CannotWrite(f"{error}; make room or make it writable; {self.how_to_resume()}") from None

    def load(self, weights: dict, optimizers: list, say=print) -> dict:
        """Restores the optimizers in place and returns everything else that was saved, the weights under "model". If
        the newest state is damaged, reports it and loads the state before it. Raises Mistake if none fits.

        weights: {name: tensor} of the run that resumes; only their names and shapes are read
        """
        found = states(self.out_dir)
        if not found:
            raise no_state(self.out_dir)
        path = found[0]
        mapped = any(map(is_sharded, weights.values()))
        try:
            state = read_state(path, mapped)
        except Mistake as mistake:
            if len(found) == 1:
                raise
            path = found[1]
            state = read_state(path, mapped)
            say(f"{mistake}: resuming from {path}, the state before it")
        then = state.pop("layout") | state.pop("identity", {})
        now = layout(weights, optimizers) | self.identity
        differing = [key for key in now if then.get(key) != now[key]]
        if differing:
            raise Mistake(f"{path} is of a run that differs in {', '.join(differing)}; choose another out_dir, or "
                          f"resume with the settings of {self.path(CONFIG)}: {resume_command(self.out_dir)}")
        states_of_optimizers = state.pop("optimizers")
        for optimizer, saved in zip(optimizers, states_of_optimizers, strict=True):
            saved["param_groups"] = optimizer.state_dict()["param_groups"]  # the settings of this run
            if mapped:
                from core.performance.sharding import shard_state
                shard_state(saved, optimizer)
            optimizer.load_state_dict(saved)
        self.last = path
        self.last_step = state["step"]
        return state


def read_state(path, mapped=False):
    """Loads a state file. Raises Mistake if it is damaged.
    mapped: memory-maps the tensors, so that the ranks of a machine share the memory"""
    with others(f"{path} is damaged or cut short", "start without resume"):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def check_same_step(dist, step, out_dir):
    """Raises Mistake on every rank if the ranks resume from states of different steps."""
    dist.barrier()  # one rank may read its state much faster than another
    first = -dist.agree(-step)
    last = dist.agree(step)
    if first != last:
        raise Mistake(f"rank {dist.rank} resumes from step {step}, but the ranks have steps {first} to {last}: "
                      f"out_dir={out_dir} must be the same folder, with the same states, on every rank")


def as_plain(x):
    """Turns a dataclass, and the dataclasses in it, into dictionaries and lists of tensors and values.

    dataclasses.asdict would copy every tensor and, for a view, the whole viewed tensor.
    """
    if is_dataclass(x):
        x = values_of(x)
    if isinstance(x, dict):
        return {name: as_plain(part) for name, part in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(as_plain(part) for part in x)
    return x
