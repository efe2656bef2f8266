"""Ray's workers sample what the policy samples, whatever their number, with the weights of the last sync.

Here Ray is a stand-in that runs in this process. Real workers, and their deaths, are in test_ray_runs.py.
"""

import copy
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from core.errors import Mistake
from core.resume import resume_command
from grpo.samplers import ray as module
from grpo.samplers.ray import RaySampler, gpus_beside, pack
from tests.tiny import (
    causal_policy, config, consumer, fill_policy, one_process, prompt_config, prompt_consumer, prompt_fill_policy)


class Actor:
    """A worker in this process, which does what it is asked for when the answer is asked for."""

    def __init__(self, *arguments):
        self.worker = module.RayWorker(*arguments)

    def __getattr__(self, name):
        return SimpleNamespace(remote=partial(partial, getattr(self.worker, name)))


RAY = SimpleNamespace(
    is_initialized=lambda: True, put=copy.deepcopy, get=lambda promises, timeout: [promise() for promise in promises],
    remote=lambda **options: lambda cls: SimpleNamespace(remote=Actor))


@pytest.fixture
def world(dataset, prompts, monkeypatch):
    """(kind, settings) -> (RaySampler, policy, iteration -> problems)"""
    monkeypatch.setattr(module, "require_ray", lambda: RAY)

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
    for one, other in zip(found.inputs.get("kept", []), expected.inputs.get("kept", []), strict=True):
        assert torch.equal(one.ids, other.ids)


@pytest.mark.parametrize("kind, workers, settings", [
    ("causal", 3, {"top_k": 9}), ("causal", 7, {}),  # more workers than problems
    ("fill", 3, {"unmask_steps": 3, "top_p": 0.8}), ("any order", 2, {"unmask_steps": 2, "block_length": 3})])
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


class WorkerFailed(Exception):
    pass


@pytest.mark.parametrize("has_state", [True, False])
def test_of_a_worker_that_fails_the_command_that_resumes_is_told_if_there_is_a_state(world, tmp_path, monkeypatch,
                                                                                     has_state):
    monkeypatch.setattr("sys.argv", ["grpo/train_grpo.py"])
    sampler, _, problems = world(out_dir=str(tmp_path))
    if has_state:
        (tmp_path / "state.pt").touch()
    errors = SimpleNamespace(RayTaskError=KeyError, RayError=WorkerFailed)
    get = Mock(side_effect=WorkerFailed("it died"))
    sampler.start(problems(0), 0)
    sampler.ray = SimpleNamespace(get=get, exceptions=errors)
    with pytest.raises(Mistake, match="it died") as found:
        sampler.finish()
    assert (resume_command(str(tmp_path)) in str(found.value)) == has_state


def test_what_workers_say_of_environments_is_said_once(world, monkeypatch, capsys):
    monkeypatch.setattr(module, "WARNED", {"one": "in a worker"})
    worker = module.RayWorker(lambda config: SimpleNamespace(sample=lambda *_: torch.ones(2)), None)
    worker.version = 0
    _, said = worker.sample({}, 0, 0, {})
    assert said == {"one": "in a worker"}
    monkeypatch.setattr("grpo.environments.WARNED", {})
    sampler, *_ = world()
    for _ in range(2):
        sampler.starts.append([lambda: (torch.ones(2), {"one": "in a worker"})] * 2)
        assert len(sampler.finish()) == 4
    assert capsys.readouterr().err == "in a worker\n"


def test_weights_of_every_kind_come_to_the_last_bit():
    weights = {"matrix": torch.randn(3, 4).T, "half": torch.randn(5).bfloat16(), "flags": torch.tensor([True, False])}
    loaded = {}
    policy = SimpleNamespace(weights=lambda: weights, load_weights=loaded.update, sample=lambda *_: weights["half"])
    module.RayWorker(lambda config: policy, None).sample({}, 0, 1, pack(weights))
    assert all(loaded[name].dtype == x.dtype and torch.equal(loaded[name], x) for name, x in weights.items())


@pytest.mark.parametrize("visible, rank, ranks, names", [
    ("", 0, 1, ["1", "2", "3"]), ("", 1, 2, ["3"]), ("4,5,6", 1, 3, ["5"])])
def test_workers_get_the_gpus_that_no_rank_trains_on_else_that_of_their_rank(monkeypatch, visible, rank, ranks, names):
    for name, x in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.setenv(name, str(x))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_beside(SimpleNamespace(device=torch.device("cuda", rank))) == names
