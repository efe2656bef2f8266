"""Every sampler has the whole interface, with the same parameters."""

import inspect

import pytest

from grpo.samplers.local import LocalSampler
from grpo.samplers.ray import RaySampler
from grpo.samplers.sampler import Sampler, SamplerError
from grpo.samplers.vllm import VllmSampler

METHODS = [name for name, x in vars(Sampler).items() if inspect.isfunction(x) and not name.startswith("_")]


@pytest.mark.parametrize("kind", [LocalSampler, RaySampler, VllmSampler])
def test_a_sampler_has_the_whole_interface(kind):
    assert {"start", "finish", "sync", "score", "close"} <= set(METHODS)
    for name in METHODS:
        assert list(inspect.signature(getattr(kind, name)).parameters) == list(
            inspect.signature(getattr(Sampler, name)).parameters), name
    assert kind.outside == (kind is not LocalSampler)


def test_what_a_sampler_cannot_do_is_one_line_for_the_user():
    assert issubclass(SamplerError, ValueError)  # core.config.run_script prints it as a line
