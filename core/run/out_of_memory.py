"""A run that is out of memory ends in one line that names the settings which lower what it needs."""

import re
from contextlib import contextmanager

import torch

from core.files.records import has_prompts
from core.models import is_huggingface
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
        settings = ", ".join(f"{key}={getattr(config, key)}" for key in keys_of(config))
        raise ValueError(f"out of memory ({one_line(error, 100)}); change what lowers it: {settings}") from error


def keys_of(config):
    """The keys of KEYS that this run's memory depends on."""
    prompts = hasattr(config, "max_new_tokens") and has_prompts(config.dataset)
    unused = {"block_size"} if prompts else {"max_new_tokens"}
    path = getattr(config, "generator_checkpoint", None) or getattr(config, "init_from", None)
    if path is None or not is_huggingface(path):
        unused |= {"lora_rank", "load_in_4bit"}
    return [key for key in KEYS if hasattr(config, key) and key not in unused]
