"""Packs weights, while they do not change, in the layout that a CPU multiplies fastest with."""

from contextlib import contextmanager

import torch
from torch import nn

from core.model import GPT

PACK_FROM = 2**17  # smaller weights are not packed, because it does not pay


@contextmanager
def prepacked(module):
    """In the block, large linear layers on a CPU use packed copies of their weights, which must not change. No
    gradients."""
    dtype = torch.float32
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    layers = [layer for layer in module.modules() if can_pack(layer, dtype)]
    try:
        for layer in layers:
            layer.forward = packed(layer, dtype)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def can_pack(layer, dtype):
    """True if the weights of a layer can be packed for products in this precision, and packing them pays."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    weight = layer.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    return weight.numel() >= PACK_FROM


def packed(layer, dtype):
    """Returns the forward of a linear layer with a packed copy of its weights in this precision."""
    weight = layer.weight.detach().to(dtype)
    weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    bias = layer.bias
    if bias is not None:
        bias = bias.detach().to(dtype)

    def forward(x):
        x = x.to(dtype)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    return forward


def has_fast_bfloat16(model):
    """True if `pack_in_bfloat16` makes a model faster: a GPT on a CPU with instructions for bfloat16."""
    if not isinstance(model, GPT) or model.embed.weight.device.type != "cpu":
        return False
    has_instructions = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return has_instructions and torch.backends.mkldnn.is_available()


def pack_in_bfloat16(model):
    """Makes the blocks of a frozen GPT multiply in bfloat16 from now on, with packed copies of their weights."""
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = packed(layer, torch.bfloat16)
