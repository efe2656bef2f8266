"""The fill-in step and the usual one compute the same."""

import pytest

from grpo.benchmarks.fill import Checkpointed, Fill
from tests.grpo.benchmarks.sides import expect_equal_gradients


@pytest.mark.parametrize("kind", [Fill, Checkpointed])
def test_both_sides_have_the_same_gradient(kind):
    expect_equal_gradients(kind)
