"""Weights in the layout that a CPU multiplies fastest with, for as long as they do not change."""

from contextlib import contextmanager

import torch
from torch import nn

PACK_FROM = 2**17  # numbers in a weight from which packing it is faster


@contextmanager
def prepacked(model):
    """Within it, the large linear layers of a model on a CPU compute with packed copies of their weights, in autocast's
    precision. For few rows, as in generation, that is faster. No gradients flow, and the weights must not change."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    layers = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)
              and can_pack(m.weight, dtype)]
    for layer in layers:
        layer.forward = packed(layer, dtype)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def can_pack(weight, dtype):
    return (weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= PACK_FROM
            and not torch.is_grad_enabled() and torch.backends.mkldnn.is_available()
            and (dtype == torch.float32 or dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def packed(layer, dtype):
    """The forward of a linear layer with a packed copy of its weights in this precision."""
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach().to(dtype))
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.to(dtype), weight, bias, "none", [], "")
