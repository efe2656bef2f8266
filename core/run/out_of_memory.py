"""A run that is out of memory ends in one line that names the settings which lower what it needs."""

import re
from contextlib import contextmanager

import torch

from core.settings.user_code import one_line

KEYS = ("batch_size", "group_size", "max_new_tokens", "block_size", "micro_batch_tokens", "grad_checkpoint", "dtype",
        "lora_rank", "load_in_4bit")
WORDS = "out of memory|can't allocate memory|ALLOC_FAILED"  # of CUDA and MPS, of a CPU, of CUDA's libraries


@contextmanager
def naming_what_lowers_memory(config):
    """Raises ValueError in place of an error of the block that says that there is no memory left."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, (MemoryError, torch.OutOfMemoryError)) or re.search(WORDS, str(error))):
            raise
        settings = ", ".join(f"{key}={getattr(config, key)}" for key in KEYS if hasattr(config, key))
        raise ValueError(f"out of memory ({one_line(error, 100)}); change what lowers it: {settings}") from error
