"""Causal training and the usual step compute the same."""

import pytest

from core import distributions
from grpo.benchmarks.causal import Causal, Vocabulary
from tests.grpo.benchmarks.sides import expect_equal_gradients


@pytest.mark.parametrize("kind", [Causal, Vocabulary])
def test_both_sides_have_the_same_gradient(kind, monkeypatch):
    if kind is Vocabulary:  # it measures a Qwen2
        pytest.importorskip("transformers")
    monkeypatch.setattr(distributions, "LOGITS_AT_ONCE", 2 * 5000)  # so that 5,000 tokens are cut into parts
    expect_equal_gradients(kind, vocab_size=5000)
