"""Weights survive being packed: to the last bit, in every dtype and shape."""

import torch

from grpo.samplers.packed_weights import pack, unpack


def test_weights_come_back_to_the_last_bit():
    weights = {"matrix": torch.randn(3, 4).T, "half": torch.randn(5).bfloat16(), "scalar": torch.tensor(2.5),
               "empty": torch.zeros(0, 3), "ids": torch.arange(4), "flags": torch.tensor([True, False])}
    back = unpack(pack(weights))
    assert list(back) == list(weights)
    for name, x in weights.items():
        assert back[name].dtype == x.dtype and torch.equal(back[name], x), name


def test_packed_weights_do_not_change_with_the_policy():
    x = torch.ones(3)
    packed = pack({"x": x})
    x.zero_()
    assert unpack(packed)["x"].tolist() == [1.0, 1.0, 1.0]
