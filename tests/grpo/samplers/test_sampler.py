"""Every sampler has the whole interface, with the same parameters."""

import inspect

import pytest

from grpo.samplers.prefetch import LocalSampler
from grpo.samplers.ray import RaySampler
from grpo.samplers.sampler import Sampler
from grpo.samplers.vllm import VllmSampler


@pytest.mark.parametrize("kind", [LocalSampler, RaySampler, VllmSampler])
def test_a_sampler_has_the_whole_interface(kind):
    names = ["start", "finish", "sync", "close"]
    assert all(inspect.signature(getattr(kind, x)) == inspect.signature(getattr(Sampler, x)) for x in names)
