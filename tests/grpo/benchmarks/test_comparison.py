"""A step of this project and the usual one compute the same."""

import pytest
import torch

from grpo.benchmarks.comparison import BenchConfig, Causal, Checkpointed, Fill


@pytest.mark.parametrize("kind", [Fill, Causal, Checkpointed])
def test_both_sides_have_the_same_gradient(kind):
    both = kind(BenchConfig(n_layer=1, n_embd=16, block_size=32, batch_size=2, group_size=3, device="cpu",
                            prompt_length=20, completion_length=4))
    rows = both.step("shared")
    ours = torch.from_numpy(both.gradient())
    assert set(both.step("naive")) == set(rows) >= {"seconds", "peak MB"} and ours.norm() > 0
    torch.testing.assert_close(ours, torch.from_numpy(both.gradient()), rtol=1e-4, atol=1e-6)
