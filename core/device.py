"""Device and precision by their names."""

import os

import torch

NVIDIA = "/dev/nvidia0"  # the first GPU of a Linux machine


def detect_device(name="auto", local_rank=0):
    """The device that `name` asks for: 'auto' takes cuda, then mps, then cpu."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kinds = [kind for kind, found in there.items() if found]
    kind, _, index = name.partition(":")
    if name == "auto":
        kind = kinds[0]
        if kind == "cpu" and os.path.exists(NVIDIA) and "CUDA_VISIBLE_DEVICES" not in os.environ:
            raise ValueError(f"device='auto' finds {NVIDIA}, but torch {torch.__version__} cannot use it; mend that "
                             "or set device='cpu'")
    if kind not in kinds or (index and not index.isdecimal()):
        raise ValueError(f"device={name!r} is no device of this machine; set auto or one of: {', '.join(kinds)}")
    if kind != "cuda":
        return torch.device(kind)
    count = torch.cuda.device_count()
    if count == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:  # a launcher shows each rank a GPU of its own
        local_rank = 0
    index = int(index or local_rank)
    if index >= count:
        raise ValueError(f"GPU {index} is asked for, but there are {count}; start fewer ranks or set device")
    return torch.device("cuda", index)


def detect_dtype(name, device):
    """'auto' is bfloat16 on a GPU that computes in it (from capability 8.0), and float32 elsewhere."""
    if name == "auto":
        name = "float32"
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            name = "bfloat16"
    return getattr(torch, name)
