"""Ray's workers sample what the policy samples, whatever their number; how a run comes to its Ray.

Here Ray is a stand-in that runs in this process. Real workers, and their deaths, are in test_ray_runs.py.
"""

import copy
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from grpo.samplers import ray as module
from grpo.samplers.ray import LEAST_STORE, RaySampler, RayWorker, gpus_beside, pack
from grpo.samplers.sampler import SamplerError
from tests.exactness.test_turns import SETTINGS as EPISODES
from tests.tiny import (
    ROOT, causal_policy, config, consumer, fill_policy, one_process, prompt_config, prompt_consumer, prompt_fill_policy)


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
    """In the place of the package ray. late: no answer comes in time; error: of ray.init; calls: of it, with the
    environment that it saw"""

    exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
    _raylet = SimpleNamespace(Config=SimpleNamespace(initialize=str))
    put = staticmethod(copy.deepcopy)

    def __init__(self):
        self.late, self.up, self.error, self.calls = False, False, None, []

    def is_initialized(self):
        return self.up

    def init(self, address, **settings):
        self.calls.append((address, settings, dict(os.environ)))
        if self.error:
            raise self.error
        self.up = True

    def shutdown(self):
        self.up = False

    def remote(self, **options):
        return lambda cls: SimpleNamespace(remote=lambda *arguments: Actor(partial(cls, *arguments)))

    def get(self, promises, timeout):
        if self.late:
            raise GetTimeoutError
        return [promise() for promise in promises]

    def kill(self, actor):
        raise RayError("no cluster")


@pytest.fixture
def fake(monkeypatch):
    ray = FakeRay()
    monkeypatch.setattr(module, "require", lambda *_: ray)
    return ray


@pytest.fixture
def world(fake, dataset, prompts):
    """(kind, settings) -> (RaySampler of two workers, policy, iteration -> problems)"""
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
    assert torch.equal(found.inputs["chosen"], expected.inputs["chosen"])
    for one, other in zip(found.inputs.get("kept", []), expected.inputs.get("kept", []), strict=True):
        assert torch.equal(one.ids, other.ids)


@pytest.mark.parametrize("kind, workers, settings", [
    ("causal", 1, EPISODES), ("causal", 3, EPISODES | {"top_k": 9}),
    ("causal", 7, {}),  # more workers than problems
    ("fill", 3, {"unmask_steps": 3, "top_p": 0.8}),
    ("any order", 2, {"unmask_steps": 2, "block_length": 3, "unmask_order": "confidence"}),
    ("fill", 2, {"unmask_steps": 3, "fill_estimator": "one_step"})])
def test_workers_sample_what_the_policy_samples(world, kind, workers, settings):
    sampler, policy, problems = world(kind, ray_workers=workers, **settings)
    sampler.start(problems(0), 0)
    expect_same(sampler.finish(), policy, problems(0), 0, sampler.config)


def test_a_start_is_sampled_with_the_weights_of_the_last_sync_before_it(world):
    sampler, policy, problems = world(max_staleness=1)
    sampler.start(problems(0), 0)
    sampler.start(problems(1), 1)
    before = copy.deepcopy(policy)
    with torch.no_grad():
        for x in policy.parameters():
            x.mul_(1.2)
    sampler.sync(policy.weights(), 1)
    sampler.start(problems(2), 2)
    for i, writer in enumerate((before, before, policy)):
        expect_same(sampler.finish(), writer, problems(i), i, sampler.config)


def test_weights_of_every_kind_are_copied_to_the_last_bit_once_for_each_version(monkeypatch):
    weights = {"matrix": torch.randn(3, 4).T, "half": torch.randn(5).bfloat16(), "flags": torch.tensor([True, False])}
    loaded = []
    monkeypatch.setattr(module, "moved", lambda x, device: x)
    policy = SimpleNamespace(weights=lambda: weights, load_weights=loaded.append, sample=lambda *_: None)
    worker = RayWorker(lambda config: policy, None)
    for version in (0, 0, 1, 1, 0):
        worker.sample({}, 0, version, pack(weights))
    assert len(loaded) == 3
    assert all(loaded[0][name].dtype == x.dtype and torch.equal(loaded[0][name], x) for name, x in weights.items())


@pytest.mark.parametrize("late, named", [(True, "seconds"), (False, "top_k=7")])
def test_a_late_worker_and_an_error_of_its_code_end_the_run_with_a_line(world, fake, monkeypatch, late, named):
    sampler, _, problems = world()

    def broken(*_):
        raise ValueError("top_k=7 is not for this model")

    monkeypatch.setattr(RayWorker, "sample", broken)
    sampler.start(problems(0), 0)
    fake.late = late
    with pytest.raises(SamplerError, match=f"sampler='ray'.*{named}"):
        sampler.finish()
    sampler.close()
    assert not fake.up, "a Ray that is gone does not hide why the run ends"


def join(**settings):
    c = prompt_config(sampler="ray", **settings)
    return RaySampler(lambda config: causal_policy(), causal_policy(), c, one_process())


def test_a_run_starts_its_own_ray_with_room_for_the_weights_in_flight_and_ends_it(fake, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    before = dict(os.environ)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    sampler = join(ray_workers=3, max_staleness=1)
    (address, settings, seen), = fake.calls
    size = sum(x.nbytes for x in sampler.policy.weights().values())
    assert address == "local" and settings["num_cpus"] == 6 and settings["include_dashboard"] is False
    assert settings["object_store_memory"] == LEAST_STORE + int(3.3 * size) > LEAST_STORE
    assert seen["PYTHONPATH"].split(os.pathsep)[0] == ROOT, "workers import this repository"
    assert seen["RAY_AUTH_MODE"] == "token" and len(seen["RAY_AUTH_TOKEN"]) == 64
    assert seen["RAY_USAGE_STATS_ENABLED"] == "0", "nothing is sent to the makers of Ray"
    assert dict(os.environ) == before, "what is set for Ray is set for it alone"
    join().close()
    assert fake.up and len(fake.calls) == 1, "a Ray that the caller has started is used and stays open"
    sampler.close()
    assert not fake.up


@pytest.mark.parametrize("address, error", [
    ("", RuntimeError("Failed to start GCS\nno port")), ("auto", ConnectionError("no Ray instance"))])
def test_a_ray_that_is_not_there_or_cannot_start_is_one_line(fake, monkeypatch, address, error):
    fake.error = error
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(SamplerError, match=f"^[^\n]*RAY_ADDRESS={address} [^\n]*$"):
        join()


@pytest.mark.parametrize("visible, rank, ranks, names", [
    ("", 0, 1, ["1", "2", "3"]), ("", 1, 2, ["3"]), ("4,5,6", 1, 3, ["5"])])
def test_workers_get_the_gpus_that_no_rank_trains_on_else_that_of_their_rank(monkeypatch, visible, rank, ranks, names):
    for name, x in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.setenv(name, str(x))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_beside(SimpleNamespace(device=torch.device("cuda", rank))) == names
