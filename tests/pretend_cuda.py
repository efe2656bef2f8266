"""A CPU build of PyTorch that plays a GPU: it raises where CUDA would refuse, and counts where the CPU waits for it.

with PretendCuda() as gpu: ...        # torch.cuda.is_available() is True, x.to("cuda").device is cuda:0

Every tensor stays one of the CPU. Its storage is marked, so that views, parameters, gradients, saved activations and
optimizer states are on the GPU with it. A host sync is what torch.cuda.set_sync_debug_mode reports: .item(), .tolist(),
.cpu(), nonzero, masks as indices, copies between devices without non_blocking=True.
Not seen: the numbers of CUDA's kernels, its own lists of autocast (the CPU's hold), other threads and processes, FSDP2.
"""

import collections
import contextlib
import os
import sys
from unittest import mock

import torch
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.performance.decode import Decoder

with contextlib.suppress(ImportError):  # it would look for a library of CUDA where a GPU is played
    import bitsandbytes  # noqa: F401

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
T = torch.Tensor
DEVICE, IS_CUDA, IS_CPU = T.device.__get__, T.is_cuda.__get__, T.is_cpu.__get__
MOVES = {"copy_", "_to_copy", "set_"}
INDEXING = {"index", "index_put", "index_put_"}
TAKES_NUMBERS = {"fill_", "masked_fill", "masked_fill_"}  # a 0-d tensor of the CPU too, like all pointwise operations
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount",
         "equal"}
# What runs when the CPU waits, by the outermost of these functions on the stack
PHASES = {"train_on_rollouts": "step", "generate": "token", "fill_in_passes": "token", "Decoder.__call__": "token",
          "predict_and_sample_tokens": "token"}


class DeviceMix(RuntimeError):
    """CUDA would refuse this."""


def on_gpu(x):
    return getattr(x.untyped_storage(), "is_pretended", False)


def mark(x, gpu=True):
    """Puts a tensor's storage on the GPU, or on the CPU. Returns the tensor."""
    if isinstance(x, T):
        x.untyped_storage().is_pretended = gpu
    return x


def backward(loss):
    """Tensor.backward. Through the real one a mode would not see the calls of checkpoints, which compute again."""
    torch.autograd.graph._engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (),
                                              allow_unreachable=True, accumulate_grad=True)


class PretendCuda(TorchFunctionMode, TorchDispatchMode):
    """As a function mode it answers what Python asks (.device, .to, device=...); as a dispatch mode it sees every
    operation below autograd and autocast.

    syncs: {(phase, line and reason): count}, phases: step, token, other; mixes: lines, with those in rewards, whose
    errors a run may survive
    """

    kind = "cuda"

    def __init__(self, capability=(9, 0), memory=2**34):
        """memory: bytes of the GPU"""
        TorchDispatchMode.__init__(self)
        self.device = torch.device(self.kind, 0)
        self.capability, self.memory = capability, memory
        self.syncs, self.mixes, self.replays = collections.Counter(), [], 0
        self.inside = None  # whether the call of Python that is under way has a tensor of the GPU; None: no call
        self.must_not_wait = False

    @contextlib.contextmanager
    def no_syncs(self):
        """Within, or in the function no_syncs()(function), a host sync raises AssertionError with its line."""
        self.must_not_wait = True
        try:
            yield
        finally:
            self.must_not_wait = False

    def place(self):
        """(phase, line of the repository) of what the program does."""
        frame, line, phase = sys._getframe(1), None, "other"
        while frame is not None:
            code = frame.f_code
            path = code.co_filename.removeprefix(f"{ROOT}/")
            if path.startswith(("core/", "grpo/", "tests/")) and path != "tests/pretend_cuda.py":
                line = line or f"{path}:{frame.f_lineno} {code.co_name}"
                phase = PHASES.get(code.co_qualname, phase)
            frame = frame.f_back
        return phase, line

    def waits(self, why):
        phase, line = self.place()
        assert not self.must_not_wait, f"{why} at {line}"
        self.syncs[phase, f"{line}: {why}"] += 1

    def put(self, x, gpu=True):
        """mark, for tensors that an operation makes."""
        return mark(x, gpu)

    def refuse(self, why):
        self.mixes.append(f"{why} at {self.place()[1]}")
        raise DeviceMix(self.mixes[-1])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return self.operation(func, args, kwargs or {})

    def operation(self, func, args, kwargs):
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, T)]
        result_there = any(map(on_gpu, tensors))
        if result_there and name in INDEXING:
            self.check_index(*args[:3])
        elif result_there and name not in MOVES:
            alone = [x for x in tensors if not on_gpu(x)]
            joins = torch.Tag.pointwise in func.tags or name in TAKES_NUMBERS
            if any(x.dim() or not joins for x in alone):
                self.refuse(f"{name} of tensors on both devices")
            if name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
                self.waits(name)
        if not tensors:  # made in C++ by a function with a tensor of the GPU, or by a backward pass
            backward = self.inside is None and torch._C._current_autograd_node() is not None
            result_there = bool(self.inside) or backward
        out = func(*args, **kwargs)
        if name == "copy_" and on_gpu(args[0]) != on_gpu(args[1]) and out.numel() and not any(args[2:]):
            self.waits("copy_ between devices")
        if result_there and name in PRODUCTS and out.dtype == torch.bfloat16 and self.capability < (8, 0):
            self.refuse(f"{name} in bfloat16, which is emulated")
        if result_there:
            known = {x.untyped_storage()._cdata for x in tensors}
            for x in tree_leaves(out):
                if isinstance(x, T) and x.untyped_storage()._cdata not in known:
                    self.put(x)
        return out

    def check_index(self, x, indices, values=None):
        """x[indices], or x[indices] = values."""
        indices = [i for i in indices if i is not None]
        masks = [i.dtype in (torch.bool, torch.uint8) for i in indices]
        number = values is not None and not values.dim() and not on_gpu(values)
        if number and masks == [True] and on_gpu(indices[0]):
            return  # it fills where the mask is True
        for i, is_mask in zip(indices, masks, strict=True):
            if on_gpu(i) and not on_gpu(x):
                self.refuse("a tensor of the CPU is indexed by one of the GPU")
            if is_mask or not on_gpu(i):
                self.waits("a mask as an index" if on_gpu(i) else "an index of the CPU")
        if values is not None and on_gpu(values) != on_gpu(x):
            if values.dim():
                self.refuse("values are put into a tensor of another device")
            self.waits("a number is put at indices")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before, kwargs = self.inside, dict(kwargs or {})
        tensors = [y for x in (*args, *kwargs.values()) for y in (x if isinstance(x, (list, tuple)) else (x,))]
        self.inside = any(isinstance(x, T) and on_gpu(x) for x in tensors)
        try:
            return self.call(func, args, kwargs)
        finally:
            self.inside = before

    def call(self, func, args, kwargs):
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        there = isinstance(first, T) and on_gpu(first)
        if name == "__get__":
            answers = {DEVICE: self.device, IS_CUDA: self.kind == "cuda", IS_CPU: False} if there else {}
            return answers[func] if func in answers else func(*args)
        if isinstance(first, T) and name in ("to", "cpu", "cuda"):
            return self.moved(*args, **kwargs) if name == "to" else self.moved(first, name)
        if name == "pin_memory":
            return first
        kwargs.pop("pin_memory", None)
        if there and name in ("numpy", "__array__"):
            self.refuse("a tensor of the GPU becomes an array")
        if there and name == "tolist":
            self.waits(name)
        goes = there and name in ("__deepcopy__", "new_tensor")
        if (device := kwargs.get("device")) is not None:
            goes = self.is_mine(device)
            kwargs["device"] = "cpu" if goes else device
        elif not goes:
            return func(*args, **kwargs)
        if name == "as_tensor" and isinstance(first, T):
            return self.moved(first, device, kwargs.get("dtype"))
        out = self.put(func(*args, **kwargs), goes)
        if goes and name in ("tensor", "as_tensor", "new_tensor") and out.numel():
            self.waits(f"{name} copies to the GPU")
        return out

    def is_mine(self, device):
        """Whether a device is the GPU."""
        return torch.device(device).type == self.kind

    def moved(self, x, *args, copy=False, **kwargs):
        """x.to(...)"""
        if isinstance(other := args[0] if args else kwargs.pop("other", None), T):
            args = self.device if on_gpu(other) else DEVICE(other), other.dtype, *args[1:]
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **kwargs)
        here = on_gpu(x)
        there = here if device is None else self.is_mine(device)
        out = x.to(dtype=dtype or x.dtype, copy=copy or here != there, memory_format=layout or torch.preserve_format)
        if here != there:
            self.put(out, there)
            if out.numel() and not non_blocking:
                self.waits("to the GPU" if there else "to the CPU")
        return out

    def captured(self, decoder, step):
        """What replays a CUDA graph: step, which must not wait."""
        def replay():
            self.replays += 1
            with self.no_syncs():
                step()
        return replay

    def grouped(self, gradients):
        """_group_tensors_by_device_and_dtype, which asks C++ for the device."""
        found = torch._C._group_tensors_by_device_and_dtype(gradients, False)
        return {(self.device, dtype): part for (_, dtype), part in found.items()}

    def backend(self):
        """What torch and the decoder know of the GPU: pairs of a module or class and {name: what takes its place}."""
        native = self.capability >= (8, 0)
        return [
            (torch.cuda, {"is_available": lambda: True, "set_device": lambda device: None,
                          "device_count": lambda: 1,
                          "is_bf16_supported": lambda including_emulation=True: including_emulation or native,
                          "mem_get_info": lambda device=None: (self.memory, self.memory),
                          "max_memory_allocated": lambda device=None: 0,
                          "reset_peak_memory_stats": lambda device=None: None, "synchronize": lambda device=None: None,
                          "get_device_capability": lambda device=None: self.capability,
                          "get_device_name": lambda device=None: "pretended GPU"}),
            (Decoder, {"captured": lambda *arguments: self.captured(*arguments)})]

    def __enter__(self):
        autocast, enabled, dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
        changes = [
            (T, {"backward": backward}),
            (torch, {"autocast": lambda kind, *args, **settings: autocast("cpu", *args, **settings),
                     "is_autocast_enabled": lambda kind=None: enabled("cpu"),
                     "get_autocast_dtype": lambda kind: dtype("cpu")}),
            (checkpoint, {"_infer_device_type": lambda *args: "cpu"}),
            (clip_grad, {"_group_tensors_by_device_and_dtype": self.grouped}),
            *self.backend()]
        self.stack = contextlib.ExitStack()
        for where, new in changes:
            self.stack.enter_context(mock.patch.multiple(where, **new))
        checks = checkpoint._allowed_determinism_checks_to_fns  # it compares devices, inside and outside of this mode
        self.stack.enter_context(mock.patch.dict(checks, default=checks["none"]))
        TorchDispatchMode.__enter__(self)
        return TorchFunctionMode.__enter__(self)

    def __exit__(self, *error):
        TorchFunctionMode.__exit__(self, *error)
        TorchDispatchMode.__exit__(self, *error)
        self.stack.close()
