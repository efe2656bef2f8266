"""Packs weights, while they do not change, in the layout that a CPU multiplies fastest with."""

from contextlib import contextmanager

import torch
from torch import nn

from core.model import GPT

PACK_FROM = 2**17  # numbers in a weight from which packing it is faster


@contextmanager
def prepacked(module):
    """Within, large linear layers on a CPU use packed copies of their weights, which must not change. No gradients."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    layers = [layer for layer in module.modules() if can_pack(layer, dtype)]
    try:
        for layer in layers:
            layer.forward = packed(layer, dtype)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def can_pack(layer, dtype):
    """Tells whether packing the weights of a layer for products in this precision is possible and pays."""
    if type(layer) is not nn.Linear or "forward" in vars(layer) or not torch.backends.mkldnn.is_available():
        return False
    has_kernel = dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    weight = layer.weight
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return has_kernel and is_plain and weight.numel() >= PACK_FROM


def packed(layer, dtype):
    """The forward of a linear layer with a packed copy of its weights in this precision."""
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype))
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.to(dtype), weight, bias, "none", [], "")


def has_fast_bfloat16(model):
    """Tells whether `pack_in_bfloat16` makes a model faster: a GPT on a CPU with instructions for bfloat16."""
    if not isinstance(model, GPT) or next(model.parameters()).device.type != "cpu":
        return False
    return torch.backends.mkldnn.is_available() and torch.cpu.get_capabilities().get("avx512_bf16", False)


def pack_in_bfloat16(model):
    """Makes the blocks of a frozen GPT multiply in bfloat16 from now on, with packed copies of their weights."""
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = packed(layer, torch.bfloat16)
