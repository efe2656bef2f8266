"""Compiled layers."""

from functools import cache, partial

import torch


def compile_blocks(blocks):
    """Compiles what the layers compute before and after their attention, for texts. Token by token, as in generation,
    the shapes change too often, and weights are packed instead."""
    for block in blocks:
        for name in ("before", "after"):
            setattr(block, name, partial(compiled_for_texts, getattr(type(block), name), block))


def compiled_for_texts(function, block, x, *inputs):
    return (compiled(function) if x.shape[1] > 1 else function)(block, x, *inputs)


@cache
def compiled(function):
    """A compiled function: one for the layers of all models, so that a policy and its reference compute alike."""
    torch._dynamo.config.recompile_limit = 64  # beyond it, functions silently run uncompiled and compute otherwise
    return torch.compile(function, dynamic=True)
