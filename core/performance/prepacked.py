"""Weights in the layout that a CPU multiplies fastest with, for as long as they do not change."""

from contextlib import contextmanager

import torch
from torch import nn

CONV1D = "Conv1D"  # the linear layer of transformers' GPT-2, whose weights are transposed
PACK_FROM = 2**17  # numbers in a weight from which packing it is faster


@contextmanager
def prepacked(module):
    """Within it, the large linear layers in a module on a CPU compute with packed copies of their weights, in the
    precision of autocast. That is faster for few rows, as in generation. No gradients flow, and the weights must not
    change."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    layers = [m for m in module.modules() if (type(m) is nn.Linear or type(m).__name__ == CONV1D)
              and "forward" not in vars(m) and can_pack(m.weight, dtype)]
    try:
        for layer in layers:
            layer.forward = packed(layer, dtype)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def can_pack(weight, dtype):
    return (weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= PACK_FROM
            and not torch.is_grad_enabled() and torch.backends.mkldnn.is_available()
            and (dtype == torch.float32 or dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))


def packed(layer, dtype):
    """The forward of a linear layer with a packed copy of its weights in this precision."""
    weight = layer.weight.detach().to(dtype)                                         # (out, in), of Conv1D (in, out)
    weight = weight.T.contiguous() if type(layer).__name__ == CONV1D else weight
    weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    bias = None if layer.bias is None else layer.bias.detach().to(dtype)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x.to(dtype), weight, bias, "none", [], "")
