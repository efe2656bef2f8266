"""The memory that this process has needed, and that it can have."""

import os
import re
import sys

import torch

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container
STATUS = "/proc/self/status"  # Linux: of this program alone; rusage counts the process that started it too


def memory_in_use(device):
    """The most megabytes that this process has needed so far; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    if os.path.exists(STATUS):
        with open(STATUS) as f:
            most = re.search(r"VmHWM:\s*(\d+) kB", f.read())
        if most is not None:
            return int(most[1]) * 1024 / 1e6
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def memory_limit(device):
    """Megabytes that this process can have: of the GPU what no other process has, of the machine or of its container
    all; None where the system does not tell."""
    if device.type == "cuda":
        return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) / 1e6
    if not hasattr(os, "sysconf"):  # on Windows
        return None
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in filter(os.path.exists, LIMITS):
        with open(path) as f:
            text = f.read().strip()
        limit = min(limit, int(text)) if text.isdecimal() else limit  # "max": no limit
    return limit / 1e6
