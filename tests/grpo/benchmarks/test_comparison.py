"""A step of this project and the usual one compute the same."""

import pytest
import torch

from grpo.benchmarks.comparison import BenchConfig, Causal, Checkpointed, Fill, Turns


@pytest.mark.parametrize("kind", [Fill, Causal, Checkpointed])
def test_both_sides_have_the_same_gradient(kind):
    both = kind(BenchConfig(n_layer=1, n_embd=16, block_size=32, batch_size=2, group_size=3, device="cpu",
                            prompt_length=20, completion_length=4))
    rows = both.step("shared")
    ours = torch.from_numpy(both.gradient())
    assert set(both.step("naive")) == set(rows) >= {"seconds", "peak MB"} and ours.norm() > 0
    torch.testing.assert_close(ours, torch.from_numpy(both.gradient()), rtol=1e-4, atol=1e-6)


def test_turns_are_timed_by_the_tokens_of_all_of_them():
    both = Turns(BenchConfig(n_layer=1, n_embd=16, batch_size=2, group_size=3, device="cpu", prompt_length=20,
                             completion_length=40))
    one, several = both.step("naive"), both.step("shared")
    assert one.keys() == several.keys() and both.gradient().any()
    texts = both.policy.sample(both.problems, 0, both.in_turns).texts
    assert sum(text.count("ANSWERED") for text in texts.completions) > 6
    assert both.tokens == sum(map(len, texts.completion_ids))
