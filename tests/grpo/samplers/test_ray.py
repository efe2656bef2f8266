"""Workers share the problems, and what they write does not depend on their number.

Here Ray is a stand-in that runs in this process. Real workers, and their deaths, are in test_build.py.
"""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from grpo.samplers import ray as module
from grpo.samplers.ray import RaySampler
from grpo.samplers.sampler import SamplerError
from tests.grpo.test_episodes import SETTINGS as EPISODES
from tests.tiny import (
    causal_policy, config, consumer, fill_policy, one_process, prompt_config, prompt_consumer, prompt_fill_policy)


class RayError(Exception):
    pass


class GetTimeoutError(RayError):
    pass


class Actor:
    """A worker in this process, which does what it is asked for when the answer is asked for."""

    def __init__(self, make):
        self.make, self.worker = make, None

    def __getattr__(self, name):
        return SimpleNamespace(remote=partial(partial, self.call, name))

    def call(self, name, *arguments):
        try:
            self.worker = self.worker or self.make()
            return getattr(self.worker, name)(*arguments)
        except ValueError as error:
            raise RayError(f"traceback\nValueError: {error}") from None


class FakeRay:
    """In the place of the package ray. late: no answer comes in time"""

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
    put = staticmethod(copy.deepcopy)

    def __init__(self):
        self.killed, self.late, self.left = [], False, False

    def remote(self, **options):
        return lambda cls: SimpleNamespace(remote=lambda *arguments: Actor(partial(cls, *arguments)))

    def get(self, promises, timeout):
        if self.late:
            raise GetTimeoutError
        return [promise() for promise in promises]

    def kill(self, actor):
        self.killed.append(actor)
        raise RayError("no cluster")

    def leave(self):
        self.left = True


@pytest.fixture
def fake(monkeypatch):
    ray = FakeRay()
    monkeypatch.setattr(module, "joined_ray", lambda *_: (ray, ray.leave))
    return ray


@pytest.fixture
def world(fake, dataset, prompts):
    """(kind, settings) -> (RaySampler of two workers, policy, iteration -> problems)."""
    def made(kind="causal", **settings):
        policy_of, c_of, data_of = causal_policy, prompt_config, partial(prompt_consumer, prompts)
        if kind == "fill":
            policy_of, c_of, data_of = fill_policy, config, partial(consumer, dataset)
        if kind == "any order":
            policy_of = prompt_fill_policy
        c = c_of(sampler="ray", **{"ray_workers": 2} | settings)
        policy = policy_of()
        sampler = RaySampler(lambda config: policy_of(seed=9), policy, c, one_process())
        sampler.sync(policy.weights(), 0)
        return sampler, policy, lambda i: data_of(c).problems("train", i)
    return made


def expect_same(found, policy, problems, iteration, c):
    expected = policy.sample(problems, iteration, c)
    M = expected.mask > 0
    assert torch.equal(found.mask, expected.mask) and torch.equal(found.target[M], expected.target[M])
    torch.testing.assert_close(found.old_logp[M], expected.old_logp[M], rtol=0, atol=1e-5)
    assert found.texts.completions == expected.texts.completions and found.texts.columns == expected.texts.columns
    assert found.texts.metrics == expected.texts.metrics
    assert torch.equal(found.reading.chosen, expected.reading.chosen)
    assert (found.reading.kept is None) == (expected.reading.kept is None)
    if found.reading.kept is not None:
        assert torch.equal(found.reading.kept.ids, expected.reading.kept.ids)


@pytest.mark.parametrize("kind, workers, settings", [
    ("causal", 1, EPISODES), ("causal", 3, EPISODES | {"top_k": 9}),
    ("causal", 1, {}), ("causal", 3, {"top_p": 0.8, "top_k": 9}), ("causal", 7, {}),  # more workers than problems
    ("fill", 3, {"top_p": 0.8}), ("fill", 3, {"unmask_steps": 3, "top_p": 0.8}),
    ("fill", 2, {"unmask_steps": 3, "fill_estimator": "agrpo"}), ("any order", 2, {"unmask_steps": 3}),
    ("any order", 2, {"unmask_steps": 2, "block_length": 3, "unmask_order": "confidence"}),
    ("fill", 2, {"unmask_steps": 3, "fill_estimator": "step_merge"})])
def test_workers_write_what_the_policy_writes(world, kind, workers, settings):
    sampler, policy, problems = world(kind, ray_workers=workers, **settings)
    sampler.start(problems(0), 0)
    found, sums = sampler.finish()
    expect_same(found, policy, problems(0), 0, sampler.config)
    assert sums == {"sampler/replaced_workers": (0.0, None)}


def test_a_start_is_written_with_the_weights_of_the_last_sync_before_it(world):
    sampler, policy, problems = world(max_staleness=1)
    sampler.start(problems(0), 0)
    sampler.start(problems(1), 1)
    before = copy.deepcopy(policy)
    with torch.no_grad():
        for x in policy.parameters():
            x.mul_(1.2)
    sampler.sync(policy.weights(), 1)
    sampler.start(problems(2), 2)
    known = policy.sample(problems(4), 4, sampler.config)
    scores = sampler.score(problems(4), known)
    for i, writer in enumerate((before, before, policy)):
        expect_same(sampler.finish()[0], writer, problems(i), i, sampler.config)
    assert len(scores()) == 2, "of each worker"
    for logp in scores():
        torch.testing.assert_close(logp * known.mask, known.old_logp, rtol=0, atol=1e-5)


def test_a_worker_that_ray_has_started_again_is_counted_once(world):
    sampler, policy, problems = world()
    replaced = []
    for i in range(3):
        if i == 1:
            sampler.workers[0].worker = None
        sampler.start(problems(i), i)
        found, sums = sampler.finish()
        expect_same(found, policy, problems(i), i, sampler.config)
        replaced.append(sums["sampler/replaced_workers"][0])
    assert replaced == [0.0, 1.0, 0.0]


def test_a_late_worker_and_an_error_of_its_code_end_the_run_with_a_line(world, fake, monkeypatch):
    sampler, _, problems = world(sampler_timeout=7.0)

    def broken(*_):
        raise ValueError("top_k=7 is not for this model")

    monkeypatch.setattr(module.RayWorker, "sample", broken)
    sampler.start(problems(0), 0)
    with pytest.raises(SamplerError, match="^a worker of sampler='ray' failed: ValueError: top_k=7 is not for this"):
        sampler.finish()
    sampler.start(problems(0), 0)
    fake.late = True
    with pytest.raises(SamplerError, match="needed more than 7 seconds; raise sampler_timeout"):
        sampler.finish()
    sampler.close()
    assert fake.left and len(fake.killed) == 1, "a Ray that is gone does not hide why the run ends"


@pytest.mark.parametrize("late, line", [(False, "generator_checkpoint=x is no file"),
                                        (True, "needed more than 300 seconds; lower ray_workers, or OMP_NUM")])
def test_workers_that_cannot_be_built_end_the_run_and_leave_nothing_open(fake, late, line):
    def make(config):
        raise ValueError("generator_checkpoint=x is no file")

    fake.late = late
    with pytest.raises(SamplerError, match=line):
        RaySampler(make, causal_policy(), prompt_config(sampler="ray"), one_process())
    assert fake.left
