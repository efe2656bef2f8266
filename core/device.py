"""Devices and precisions by name."""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from core.errors import Mistake, check_version

NVIDIA = "/dev/nvidia0"  # the first GPU of a Linux machine


def detect_device(
        name: str = "auto",
        local_rank: int = 0,
        small: bool = False) -> torch.device:
    """Returns the device that `name` asks for: 'auto' takes cuda, then mps unless the model is small, then cpu."""
    check_version("torch", torch.__version__, "this project", "-r requirements.txt")
    kinds = []
    if torch.cuda.is_available():
        kinds.append("cuda")
    if torch.backends.mps.is_available():
        kinds.append("mps")
    kinds.append("cpu")
    kind, _, index = name.partition(":")
    if name == "auto":
        kind = kinds[0]
        if kind == "mps" and small:
            kind = "cpu"
            if local_rank == 0:
                sys.stderr.write("device='auto' takes the CPU for a small model; --device=mps takes the Apple GPU\n")
        if kind == "cpu" and os.path.exists(NVIDIA) and "CUDA_VISIBLE_DEVICES" not in os.environ:
            raise Mistake(f"device='auto' finds {NVIDIA}, but torch {torch.__version__} cannot use it; repair its "
                          "driver, install torch for it, or set device='cpu'")
    if kind not in kinds or (index and not index.isdecimal()):
        raise Mistake(f"device={name!r} is not a device of this machine; set auto or one of: {', '.join(kinds)}")
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:  # a launcher shows each rank only its own GPU
        local_rank = 0
    index = int(index or local_rank)
    if index >= count:
        raise Mistake(f"GPU {index} is asked for, but there are {count}; start fewer ranks or set device")
    return torch.device("cuda", index)


@functools.cache
def ids_on(device: torch.device, *ids: int) -> torch.Tensor:
    """Returns ids as a tensor on the device. Cached, because the CPU waits for each copy."""
    return torch.tensor(ids, device=device)


def detect_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of a precision. 'auto' is bfloat16 on a GPU with native support (from capability 8.0), float32
    elsewhere. 'bfloat16' is float32 on a GPU that would emulate it, slowly."""
    if device.type == "cuda" and name != "float32":
        is_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        is_bfloat16 = name == "bfloat16"
    return torch.bfloat16 if is_bfloat16 else torch.float32


@functools.cache
def gpu_logits_at_once(device: torch.device) -> int:
    """Returns the most numbers in one tensor of logits. A GPU is slow on small parts, but may have little room."""
    _, memory = torch.cuda.mem_get_info(device)
    gigabytes = memory / 2**30
    if gigabytes < 16:
        return 2**26
    if gigabytes <= 24:
        return 2**27
    return 2**28


@contextmanager
def keep_torch_defaults() -> Iterator:
    """Restores torch's default dtype, default device and gradient mode after the block."""
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    if device.type == "cpu":
        device = None  # means the CPU too; setting it by name would slow down every call of torch
    has_gradients = torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        torch.set_grad_enabled(has_gradients)


def moved(x: Any, device: torch.device) -> Any:
    """Returns x, a tensor or a record of tensors, on another device. The inputs of Rollouts stay on the CPU."""
    if torch.is_tensor(x):
        return x.to(device)
    if isinstance(x, (list, tuple)):
        return type(x)(moved(part, device) for part in x)
    if isinstance(x, dict):
        parts = {}
        for name, part in x.items():
            parts[name] = part if name == "inputs" else moved(part, device)
        return parts
    if is_dataclass(x):
        return replace(x, **moved(values_of(x), device))
    return x


def values_of(record: Any) -> dict:
    """{name: value} of the fields of a dataclass object. `vars` would miss those of a class with slots."""
    return {f.name: getattr(record, f.name) for f in fields(record)}
