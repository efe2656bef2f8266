"""Small sizes for the tests of the comparisons."""

import torch

from grpo.benchmarks.comparison import BenchConfig

SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 32, "batch_size": 2, "group_size": 3, "repeats": 1,
         "device": "cpu", "prompt_length": 20, "completion_length": 4}
ARGUMENTS = [f"--{key}={value}" for key, value in SIZES.items()]


def expect_equal_gradients(kind, **sizes):
    """Checks that both sides of a comparison have the same gradient, which is not 0."""
    both = kind(BenchConfig(**SIZES | sizes))
    both.shared()
    ours = both.gradient()
    both.naive()
    assert ours.norm() > 0
    torch.testing.assert_close(ours, both.gradient(), rtol=1e-4, atol=1e-6)
