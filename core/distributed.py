"""Device, precision and ranks: the only file that knows how many processes there are."""

import contextlib
import importlib
import io
import os
import re
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from core.sharding import is_sharded

LONGEST_WAIT = timedelta(hours=12)  # ranks wait while rank 0 evaluates, or builds a checkpoint from its recipe


def detect_device(name="auto", local_rank=0):
    """The device that `name` asks for: 'auto' takes cuda, then mps, then cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is not a device; try auto, cpu, cuda, cuda:0 or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but torch sees no CUDA GPU; use device='auto'")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device={name!r}, but torch sees no Apple GPU; use device='auto'")
    if device.type != "cuda":
        return device
    index = local_rank if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"GPU {index} is asked for, but there are {torch.cuda.device_count()}; start fewer ranks or "
                         "set device")
    return torch.device("cuda", index)


def detect_dtype(name, device):
    """'auto' is bfloat16 on a GPU that has it and float32 elsewhere."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={name!r} is not one of auto, float32, bfloat16")
    return getattr(torch, name)


def autocast(device, dtype):
    """Matrix products in dtype; a no-op for float32."""
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


class OtherRank(ValueError):
    """Another rank has ended, or does not answer."""


def store_of_attempt(rank, world):
    """The store in which ranks find each other. torchrun keeps one store for all its attempts on a machine: without a
    prefix, ranks that are started again would wait for addresses of the ended ones."""
    store, *_ = next(dist.rendezvous("env://", rank, world, timeout=LONGEST_WAIT))
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(world)  # on several, the agents count attempts apart
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "0"
    return dist.PrefixStore(f"attempt {attempt}", store)


class Distributed:
    """One process, or one of several under torchrun (nccl on CUDA, gloo elsewhere).

    timeout: seconds after which a rank that does not take part in a step ends the others. `barrier` and `agree` wait
    12 hours, because rank 0 may build or evaluate before. If a rank ends, the others end with OtherRank.
    Gradients are summed over ranks by one explicit all-reduce per optimizer step. The losses here carry their
    normalisation in their weights (see grpo/objectives.py), so the sum over ranks is the gradient, and a rank whose
    share of a step needs no backward simply adds zeros. The models in `sharded` (core/sharding.py) sum their own.
    """

    longest_wait = LONGEST_WAIT  # for core/sharding.py, which this file imports

    def __init__(self, device="auto", dtype="auto", timeout=1800.0):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = detect_device(device, int(os.environ.get("LOCAL_RANK", 0)))
        self.dtype = detect_dtype(dtype, self.device)
        self.is_main, self.timeout, self.ranks, self.sharded = self.rank == 0, timeout, None, []
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            # An optimizer imports this module too. Imported after init_process_group, its default arguments would keep
            # the group and gloo's threads alive beyond `close`, and such a thread can abort Python as it ends.
            importlib.import_module("torch.distributed.nn")
            on_gpu = self.device.type == "cuda"
            with self.ending_together(LONGEST_WAIT):
                dist.init_process_group("gloo", store=store_of_attempt(self.rank, self.world), rank=self.rank,
                                        world_size=self.world, timeout=LONGEST_WAIT)  # of `barrier` and `agree`
            with self.ending_together():
                self.ranks = dist.new_group(timeout=timedelta(seconds=timeout), backend="nccl" if on_gpu else "gloo",
                                            device_id=self.device if on_gpu else None)  # of everything else

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or self.device.type != "cuda":  # nccl would wait for ranks that have ended
            self.close()

    @contextlib.contextmanager
    def ending_together(self, limit=None, computing=False):
        """A failed exchange between ranks is raised as OtherRank, in one line.

        limit: the timedelta that the exchange may take; None: rank_timeout
        computing: whether the block computes as well, as sharded models do between exchanges; then only errors that
            the library of the exchange raises count
        """
        try:
            yield
        except RuntimeError as error:
            text = (str(error).splitlines() or [""])[0]
            exchange = isinstance(error, dist.DistError) or type(error) is RuntimeError and (
                not computing or re.search(r"\bgloo/", text))
            if not exchange:
                raise  # out of memory, for example
            late = "timed out" in text.lower() or "timeout" in text.lower()
            waited = f"{limit / timedelta(hours=1):g} hours" if limit else f"rank_timeout={self.timeout:g} seconds"
            raise OtherRank(f"rank {self.rank} ended because another rank " + (
                f"did not answer for {waited}" if late else "did: see its error")
                + f" ({text[:200]})") from None

    def total(self, x):
        """The sum of tensor x over ranks; x itself is left alone."""
        if self.world > 1:
            x = x.clone()
            with self.ending_together():
                dist.all_reduce(x, group=self.ranks)
        return x

    def largest(self, x):
        """The largest over ranks of each number of tensor x; x itself is left alone."""
        if self.world > 1:
            x = x.clone()
            with self.ending_together():
                dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.ranks)
        return x

    def sum_gradients(self, parameters):
        """Replaces the gradient of each of these parameters by its sum over ranks; a missing one counts as zero. Those
        of sharded parameters are sums already."""
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in parameters if not is_sharded(p)]
        if self.world > 1 and gradients:
            flat = torch.cat([g.flatten() for g in gradients])
            with self.ending_together():
                dist.all_reduce(flat, group=self.ranks)
            for g, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                g.copy_(summed.view_as(g))

    def broadcast(self, parameters):
        """Gives every rank the parameters of rank 0. Sharded ones are parts of them already."""
        if self.world > 1:
            with self.ending_together():
                for p in parameters:
                    if not is_sharded(p):
                        dist.broadcast(p.data, src=0, group=self.ranks)

    def gather(self, value):
        """The values of all ranks, in their order, on rank 0; None elsewhere. Tensors in it arrive on the CPU."""
        if self.world == 1:
            return [value]
        packed, values = io.BytesIO(), [None] * self.world if self.is_main else None
        torch.save(value, packed)
        with self.ending_together():
            dist.gather_object(packed.getvalue(), values, group=self.ranks)
        if not self.is_main:
            return None
        return [torch.load(io.BytesIO(x), map_location="cpu", weights_only=True) for x in values]

    def names_of_all(self, names):
        """The names that any rank has, sorted: the same list on every rank."""
        if self.world == 1:
            return sorted(names)
        found = [None] * self.world
        with self.ending_together():
            dist.all_gather_object(found, sorted(names), group=self.ranks)
        return sorted(set().union(*found))

    def barrier(self):
        """Waits for every rank, however long one of them builds or evaluates."""
        self.agree(0)

    def agree(self, number):
        """The largest of a small whole number over ranks, on the CPU. Waits as long as `barrier` does."""
        if self.world > 1:
            x = torch.tensor(int(number))
            with self.ending_together(LONGEST_WAIT):
                dist.all_reduce(x, op=dist.ReduceOp.MAX)
            number = int(x)
        return number

    def check_same_step(self, step, out_dir):
        """Raises ValueError on every rank if the states that the ranks resume from differ in their step."""
        least, most = -self.agree(-step), self.agree(step)
        if least != most:
            raise ValueError(f"rank {self.rank} resumes from step {step}, but the ranks have steps {least} to {most}: "
                             f"out_dir={out_dir} must be the same folder, with the same states, on every rank")

    def autocast(self):
        return autocast(self.device, self.dtype)

    @cached_property
    def mesh(self):
        """The ranks as sharded models know them."""
        from torch.distributed.device_mesh import DeviceMesh
        return DeviceMesh.from_group(self.ranks, self.device.type)

    def close(self):
        if self.world > 1:
            self.ranks = None  # what is still referred to keeps its threads
            self.sharded.clear()
            if "mesh" in vars(self):  # torch keeps it to the end
                vars(self.mesh).get("_pg_registry", {}).clear()
            dist.destroy_process_group()
