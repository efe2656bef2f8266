"""Packs constant weights in the layout that is fastest for CPU matrix products."""

from contextlib import contextmanager

import torch
from torch import nn

from core.model import GPT

PACK_FROM = 2**17  # elements; packing smaller weights does not pay off


@contextmanager
def prepacked(module):
    """Within the block, large linear layers on a CPU use packed copies of their weights. The weights must not change,
    and there are no gradients."""
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
    """True if a layer's weights can be packed for products in this precision and are large enough to benefit."""
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
    """Returns a forward for a linear layer that uses a copy of its weights packed in this precision."""
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
    """True if `pack_in_bfloat16` speeds up a model: a GPT on a CPU with bfloat16 instructions."""
    if not isinstance(model, GPT) or model.embed.weight.device.type != "cpu":
        return False
    has_instructions = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return has_instructions and torch.backends.mkldnn.is_available()


def pack_in_bfloat16(model):
    """Switches the linear layers in the blocks of a frozen GPT to bfloat16, with packed copies of their weights."""
    for layer in model.blocks.modules():
        if isinstance(layer, nn.Linear):
            layer.forward = packed(layer, torch.bfloat16)
