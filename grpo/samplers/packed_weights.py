"""Weights as plain bytes, which Ray's object store shares between processes without a copy."""

import torch


def pack(weights):
    """{name: (dtype, shape, bytes as numpy)} of {name: tensor}: a copy, wherever the tensors are."""
    packed = {}
    for name, x in weights.items():
        x = x.detach().to("cpu", copy=True).contiguous()
        packed[name] = str(x.dtype).removeprefix("torch."), tuple(x.shape), x.view(-1).view(torch.uint8).numpy()
    return packed


def unpack(packed):
    """{name: tensor} on the CPU."""
    weights = {}
    for name, (dtype, shape, data) in packed.items():
        weights[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        weights[name].view(-1).view(torch.uint8).numpy()[:] = data
    return weights
