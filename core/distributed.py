"""Collectives over the ranks, the processes of a run. No other file knows how many there are."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401 later, its default arguments would keep the group beyond `close`
from torch import Tensor

from core.device import detect_device, detect_dtype, moved
from core.errors import Mistake, one_line

LONGEST_WAIT = timedelta(hours=12)     # at a barrier: ranks evaluate, rank 0 saves or prepares a dataset
EXCHANGE_WAIT = timedelta(minutes=30)  # until all ranks have started, and until all take part in an exchange
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them for each of several ranks


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Computes matrix products of a block in dtype; a no-op for float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def is_sharded(x: Tensor) -> bool:
    """True if x is this rank's part of a tensor (core/performance/sharding.py)."""
    return hasattr(x, "full_tensor")


def variable(name: str, default: int) -> int:
    """Reads a whole number from an environment variable of torchrun."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or len(text) > 9:
        raise Mistake(f"{name}={text!r} must be a whole number; start the ranks with torchrun, which sets it")
    return int(text)


def check_ranks(rank: int, world: int) -> None:
    """Raises Mistake if variables of torchrun are missing or contradict each other: some schedulers set them, too."""
    if rank >= world:
        raise Mistake(f"RANK={rank} must be below WORLD_SIZE={world}; start the ranks with torchrun, which sets both")
    if world == 1:
        return
    missing = [name for name in RANK_VARIABLES if not os.environ.get(name)]
    if missing:
        raise Mistake(f"WORLD_SIZE={world} is set, but not {', '.join(missing)}; start the ranks with torchrun, which "
                      "sets them")
    if variable("MASTER_PORT", 0) > 65535:
        raise Mistake(f"MASTER_PORT={os.environ['MASTER_PORT']} must be below 65536; start the ranks with torchrun")


class Distributed:
    """One process, or one of several under torchrun (nccl on CUDA, gloo elsewhere).

    A rank that does not take part in an exchange ends the others after EXCHANGE_WAIT. Only `barrier` waits 12 hours,
    because ranks may build, evaluate or save before it. If a rank ends, the others end too.
    Gradients are summed over ranks by one explicit all-reduce per optimizer step. The losses here carry their
    normalisation in their weights (see grpo/losses.py), so the sum over ranks is the gradient, and a rank that needs no
    backward pass in a step adds zeros. Sharded models (core/performance/sharding.py) sum their gradients themselves.
    """

    def __init__(
            self,
            device: str = "auto",
            dtype: str = "auto",
            small: bool = False):  # the model is small: see detect_device
        self.rank = variable("RANK", 0)
        self.world = variable("WORLD_SIZE", 1)
        check_ranks(self.rank, self.world)
        self.device = detect_device(device, variable("LOCAL_RANK", 0), small)
        self.dtype = detect_dtype(dtype, self.device)
        self.is_main = self.rank == 0
        if self.is_main and dtype == "bfloat16" and self.dtype == torch.float32:
            sys.stderr.write("dtype='bfloat16' is float32 here: this GPU only emulates bfloat16\n")
        self.ranks = None    # the group of exchanges on the device
        self.patient = None  # the group of barriers
        self.shards = None   # the Shards of core/performance/sharding.py
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            takes_tf32 = self.dtype == torch.bfloat16
            torch.set_float32_matmul_precision("high" if takes_tf32 else "highest")
        if self.world > 1:
            self.meet()

    def meet(self) -> None:
        """Waits for the other ranks, and creates the process groups. The default group exchanges numbers on the CPU."""
        # torchrun keeps one store for all attempts: without a prefix, restarted ranks would wait for the ended ones
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        meeting = dist.rendezvous(
            "env://",
            self.rank,
            self.world,
            timeout=EXCHANGE_WAIT)
        store, *_ = next(meeting)
        store = dist.PrefixStore(attempt, store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.world,
            timeout=EXCHANGE_WAIT)
        self.ranks = dist.group.WORLD
        self.patient = dist.new_group(timeout=LONGEST_WAIT, backend="gloo")
        if self.device.type == "cuda":
            self.ranks = dist.new_group(
                timeout=EXCHANGE_WAIT,
                backend="nccl",
                device_id=self.device)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        """Ends the group. A failed exchange becomes a Mistake in one line: the rank that failed first says why."""
        if kind is None or self.device.type != "cuda":  # after an error, nccl would wait for ranks that have ended
            self.close()
        is_of_gloo = isinstance(error, RuntimeError) and re.search(r"\bgloo/", str(error))
        if is_of_gloo or isinstance(error, dist.DistError):
            raise Mistake(f"rank {self.rank} ended because another rank did, see its error, or did not answer "
                          f"within {EXCHANGE_WAIT}: {one_line(error, 200)}") from None

    def _reduced(self, x, operation, group):
        """Reduces a copy of tensor x over ranks."""
        if self.world > 1:
            x = x.clone()
            dist.all_reduce(x, operation, group)
        return x

    def total(self, x: Tensor) -> Tensor:
        """Sums tensor x over ranks."""
        return self._reduced(x, dist.ReduceOp.SUM, self.ranks)

    def largest(self, x: Tensor) -> Tensor:
        """Returns the largest value over ranks of each number in tensor x."""
        return self._reduced(x, dist.ReduceOp.MAX, self.ranks)

    def agree(self, number: int) -> int:
        """Returns the largest value over ranks of a small whole number, exchanged on the CPU."""
        number = torch.tensor(int(number))
        largest = self._reduced(number, dist.ReduceOp.MAX, None)
        return int(largest)

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replaces the gradients of trained parameters by their sums over ranks; a missing gradient counts as zero.
        Gradients of sharded parameters are sums already."""
        gradients = []
        for p in parameters:
            if not p.requires_grad:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if not is_sharded(p):
                gradients.append(p.grad)
        if self.world == 1 or not gradients:
            return
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat, group=self.ranks)
        sizes = [g.numel() for g in gradients]
        sums = flat.split(sizes)
        for g, summed in zip(gradients, sums):
            g.copy_(summed.view_as(g))

    def gathered(self) -> AbstractContextManager:
        """Gathers every sharded model on every rank for the block. Other models are always whole."""
        if self.shards is None:
            return contextlib.nullcontext()
        return self.shards.gathered()

    def micro_batches(
            self,
            parts: list,
            policy: Any,
            rollouts: Any) -> Iterable[Tensor]:
        """Returns the parts of an optimizer step that this rank reads. The caller must call `backward` for each part
        before it takes the next. Every rank must call a sharded model equally often: policy and rollouts determine the
        number of calls."""
        if self.shards is None:
            return parts
        return self.shards.micro_batches(parts, policy, rollouts)

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass for the loss of a part."""
        if self.shards is not None:
            loss = loss + self.shards.idle
        loss.backward()

    def broadcast(self, parameters: Iterable[Tensor]) -> None:
        """Copies the parameters of rank 0 to every rank. Sharded parameters already hold parts of them."""
        for p in parameters:
            if self.world > 1 and not is_sharded(p):
                dist.broadcast(p.data, src=0, group=self.ranks)

    def gather(self, value: Any) -> list | None:
        """Collects the values of all ranks on rank 0, in rank order; None elsewhere. Tensors arrive on the CPU."""
        if self.world == 1:
            return [value]
        values = [None] * self.world if self.is_main else None
        value = moved(value, "cpu")
        dist.gather_object(value, values)
        return values

    def map(self, function: Callable, items: Sequence) -> list:
        """Calls function(item) for every item, each on one rank: rank r has the items r, r + world, ... Returns all
        results in the order of the items, on every rank, with tensors on the CPU. Waits as long as a barrier."""
        results = [function(item) for item in items[self.rank :: self.world]]
        self.barrier()  # an exchange would not wait long enough
        of_ranks = self.of_all(moved(results, "cpu"))
        return [of_ranks[i % self.world][i // self.world] for i in range(len(items))]

    def of_all(self, value: Any) -> list:
        """Collects the values of all ranks on every rank, in rank order."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def keys_of_all(self, keys: Iterable) -> list:
        """Returns the sorted union of the keys of all ranks, the same list on every rank."""
        found = self.of_all(set(keys))
        return sorted(set().union(*found))

    def barrier(self) -> None:
        """Waits for every rank, however long one of them builds, evaluates or saves."""
        if self.world > 1:
            nothing = torch.zeros(())
            dist.all_reduce(nothing, group=self.patient)

    def autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.dtype)

    @cached_property
    def mesh(self) -> dist.DeviceMesh:
        """The ranks as a device mesh, for sharded models."""
        from torch.distributed.device_mesh import DeviceMesh
        return DeviceMesh.from_group(self.ranks, self.device.type)

    def close(self) -> None:
        """Ends the groups. A group that is still referred to would keep its threads."""
        if self.world > 1:
            self.ranks = self.patient = self.shards = None
            if "mesh" in vars(self):  # torch keeps the mesh until the process ends, and the mesh its groups
                vars(self.mesh).get("_pg_registry", {}).clear()
            dist.destroy_process_group()
