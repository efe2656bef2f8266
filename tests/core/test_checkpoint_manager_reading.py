"""States that cannot be read, or that are readable but wrong; and what is on the disk before them."""

import errno
import os

import pytest
import torch

from core import checkpoint_manager
from core.checkpoint_manager import CheckpointManager
from core.files.whole_files import flush
from core.supervised.config import PretrainConfig
from core.training_step import build_optimizers
from tests.tiny import model


def saved(folder, optimizer="adamw", steps=(1, 2)):
    """A manager with states, the weights, and optimizers that have made a step."""
    net = model()
    optimizers = build_optimizers(net, PretrainConfig(optimizer=optimizer))
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    for each in optimizers:
        each.step()
    manager = CheckpointManager(str(folder), lambda path, **facts: None)
    for step in steps:
        manager.save(step, net.state_dict(), optimizers, {})
    return manager, net.state_dict(), optimizers


@pytest.mark.parametrize("fault, words", [
    (OSError(errno.EIO, os.strerror(errno.EIO)), "cannot be read .Input/output error.; make it readable"),
    (PermissionError(errno.EACCES, os.strerror(errno.EACCES)), "cannot be read .Permission denied."),
    (MemoryError(), "does not fit into the memory"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "does not fit into the memory")])
def test_a_state_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch, fault, words):
    manager, weights, optimizers = saved(tmp_path)

    def fails(*_, **__):
        raise fault

    monkeypatch.setattr(checkpoint_manager.torch, "load", fails)
    with pytest.raises(ValueError, match=f"state.pt {words}") as error:
        manager.load(weights, optimizers, pytest.fail)
    assert "damaged" not in str(error.value) and "\n" not in str(error.value)


def first(state):
    return state["optimizers"][-1]["state"][0]


@pytest.mark.parametrize("optimizer, change, words", [
    ("adamw", lambda s: first(s).update(exp_avg=torch.zeros(3)), "exp_avg of an optimizer has not the shape"),
    ("adamw", lambda s: first(s).update(step=torch.zeros(3)), "step of an optimizer has not the shape"),
    ("adamw", lambda s: first(s).update(exp_avg_sq=7), "exp_avg_sq of an optimizer has not the shape"),
    ("adamw", lambda s: first(s).pop("exp_avg_sq"), "lacks a part"),
    ("adamw", lambda s: s["optimizers"][0]["state"].update({0: 3}), ""),
    ("muon", lambda s: first(s).update(momentum_buffer=torch.zeros(3, 3)), "momentum_buffer of an optimizer"),
    ("muon", lambda s: first(s).update(other=torch.zeros(3)), "one of another optimizer"),
    ("adamw", lambda s: s.update(step=-1), "without a valid step"),
    ("adamw", lambda s: s.update(step=10**30), "without a valid step"),
    *[("adamw", lambda s, facts=facts: s.update(facts=facts), "without a valid facts")
      for facts in ({"step": 3}, {"loss": 10**400}, {"loss": "low"}, {3: 0.5}, {"weights": 1.0})],
    *[("adamw", lambda s, x=x: next(iter(s["model"].values())).view(-1)[3:4].fill_(x), "embed.weight holds numbers that are not")
      for x in (float("nan"), float("inf"), float("-inf"))]])
def test_a_state_that_the_next_step_could_not_use_is_damaged(tmp_path, optimizer, change, words):
    manager, weights, optimizers = saved(tmp_path, optimizer, steps=(1,))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert manager.load(weights, optimizers, pytest.fail)["step"] == 1
    change(state)
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match=f"state.pt is damaged or cut short .*{words}") as error:
        manager.load(weights, optimizers)
    assert "\n" not in str(error.value)


def test_the_state_before_one_with_numbers_that_are_not_finite_is_used(tmp_path):
    manager, weights, optimizers = saved(tmp_path)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    next(iter(state["model"].values())).view(-1)[3] = torch.nan
    torch.save(state, tmp_path / "state.pt")
    told = []
    assert manager.load(weights, optimizers, told.append)["step"] == 1
    assert len(told) == 1 and "(NaN or infinity)); going on from" in told[0]


def test_the_records_are_on_the_disk_before_the_state_that_follows_them(tmp_path, monkeypatch):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text("{}\n")
    flushed = []
    monkeypatch.setattr(checkpoint_manager, "flush", lambda path: flushed.append(os.path.basename(path)) or flush(path))
    saved(tmp_path, steps=(1,))
    assert flushed == ["metrics.jsonl", "samples.jsonl", "state.pt.tmp"]
