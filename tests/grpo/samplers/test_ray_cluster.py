"""How a run comes to its Ray: its own, its caller's, or a cluster."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo.samplers import ray_cluster
from grpo.samplers.ray_cluster import (LEAST_STORE, environment, gpus_beside, joined_ray, one_line,
                                       threads_of_worker, worker_options)
from grpo.samplers.sampler import SamplerError
from tests.tiny import ROOT, one_process, prompt_config


class RayStub:
    """The calls of ray.init, and whether it has been shut down."""

    def __init__(self, error=None, gpus=0.0):
        self.calls, self.up, self.error, self.gpus = [], False, error, gpus

    def is_initialized(self):
        return self.up

    def init(self, address, **settings):
        self.calls.append((address, settings))
        self.seen = dict(os.environ)
        if self.error:
            raise self.error
        self.up = True

    def shutdown(self):
        self.up = False

    def cluster_resources(self):
        return {"GPU": self.gpus} if self.gpus else {}


@pytest.fixture
def stub(monkeypatch):
    def made(**settings):
        ray = RayStub(**settings)
        monkeypatch.setattr(ray_cluster, "require", lambda *_: ray)
        return ray
    return made


def ray_config(**settings):
    return prompt_config(sampler="ray", **settings)


def test_a_run_starts_its_own_ray_with_room_for_the_weights_in_flight_and_ends_it(stub):
    ray = stub()
    _, leave = joined_ray(ray_config(ray_workers=3, max_staleness=1), one_process(), 10**9)
    (address, settings), = ray.calls
    assert address == "local" and settings["num_cpus"] == 3 and settings["include_dashboard"] is False
    assert ray.seen["PYTHONPATH"].split(os.pathsep)[0] == ROOT, "workers import this repository"
    assert settings["object_store_memory"] == LEAST_STORE + 3.3e9 and ray.seen["RAY_worker_niceness"] == "0"
    leave()
    assert not ray.up


def test_a_cluster_is_joined_at_its_address(stub):
    ray = stub()
    joined_ray(ray_config(ray_address="10.1.1.1:6379"), one_process(), 0)
    (address, settings), = ray.calls
    assert address == "10.1.1.1:6379" and "num_cpus" not in settings and "object_store_memory" not in settings
    assert settings["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep)[0] == ROOT


@pytest.mark.parametrize("error", [ConnectionError("could not connect\n to it"), ValueError("no such address"),
                                   RuntimeError("version mismatch")])
def test_a_cluster_that_does_not_answer_is_named(stub, error):
    stub(error=error)
    with pytest.raises(SamplerError, match=r"ray_address=10.1.1.1:6379: no Ray cluster answers there \(.*\); start"):
        joined_ray(ray_config(ray_address="10.1.1.1:6379"), one_process(), 0)


def test_a_ray_that_the_caller_has_started_stays_open(stub):
    ray = stub()
    ray.up = True
    _, leave = joined_ray(ray_config(), one_process(), 0)
    leave()
    assert ray.up and not ray.calls


def test_without_the_package_the_pip_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="sampler='ray' needs the package ray: pip install -r requirements-ray.txt"):
        joined_ray(ray_config(), one_process(), 0)


def test_nothing_is_sent_to_the_makers_of_ray(stub, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    ray = stub()
    joined_ray(ray_config(), one_process(), 0)
    assert ray.seen["RAY_USAGE_STATS_ENABLED"] == "0" and os.environ["RAY_USAGE_STATS_ENABLED"] == "1"


def test_workers_share_the_threads_with_each_other_and_ahead_with_the_trainer(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    threads = lambda **settings: threads_of_worker(ray_config(**settings))
    assert [threads(), threads(ray_workers=2), threads(max_staleness=1), threads(ray_workers=20)] == [12, 6, 6, 1]
    assert threads(ray_workers=2, ray_address="auto") == 12


@pytest.mark.parametrize("gpus, address, share", [(0.0, None, 0.0), (1.0, None, 0.5), (8.0, None, 1.0),
                                                  (2.0, "auto", 0.25), (3.0, "auto", 1 / 3), (8.0, "auto", 1.0)])
def test_two_workers_of_each_of_four_ranks_share_the_gpus_that_ray_has(stub, gpus, address, share):
    dist = SimpleNamespace(device=torch.device("cuda"), world=4)
    assert worker_options(stub(gpus=gpus), ray_config(ray_workers=2, ray_address=address), dist)["num_gpus"] == share


@pytest.mark.parametrize("visible, rank, ranks, index, names", [
    ("", 0, 1, 0, ["1", "2", "3"]), ("", 0, 1, 2, ["0", "1", "3"]), ("7", 0, 1, 0, ["7"]),
    ("", 0, 2, 0, ["2"]), ("", 1, 2, 1, ["3"]), ("4,5,6", 1, 3, 1, ["5"])])
def test_workers_get_the_gpus_that_no_rank_trains_on_else_those_of_their_rank(monkeypatch, visible, rank, ranks, index,
                                                                              names):
    for name, x in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.setenv(name, str(x))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_beside(SimpleNamespace(device=torch.device("cuda", index))) == names


def test_only_ray_sees_what_is_set_for_it(monkeypatch):
    monkeypatch.setenv("KNOWN", "before")
    monkeypatch.delenv("UNKNOWN", raising=False)
    with environment({"KNOWN": "5", "UNKNOWN": "6"}):
        assert (os.environ["KNOWN"], os.environ["UNKNOWN"]) == ("5", "6")
    assert os.environ["KNOWN"] == "before" and "UNKNOWN" not in os.environ


@pytest.mark.parametrize("text, line", [("", "RuntimeError"), ("a\n  b \n\n", "b"), ("x" * 999, "x" * 300)])
def test_an_error_of_ray_becomes_its_last_line(text, line):
    assert one_line(RuntimeError(text)) == line
