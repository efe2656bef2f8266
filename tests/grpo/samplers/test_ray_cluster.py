"""How a run comes to its Ray: its own, its caller's, or a cluster. Real ones are in test_build.py."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo.samplers import ray_cluster
from grpo.samplers.ray_cluster import LEAST_STORE, gpus_beside, joined_ray, threads_of_worker, worker_options
from grpo.samplers.sampler import SamplerError
from tests.tiny import ROOT, one_process, prompt_config


class RayStub:
    """The calls of ray.init, and whether it has been shut down."""

    exceptions = SimpleNamespace(RayError=OSError)
    _raylet = SimpleNamespace(Config=SimpleNamespace(initialize=str))

    def __init__(self):
        self.calls, self.up, self.error, self.gpus = [], False, None, 0.0

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
        return {"GPU": self.gpus}


@pytest.fixture
def ray(monkeypatch):
    stub = RayStub()
    monkeypatch.setattr(ray_cluster, "require", lambda *_: stub)
    return stub


def join(weights_bytes=0, **settings):
    return joined_ray(prompt_config(sampler="ray", **settings), one_process(), weights_bytes)


def test_a_run_starts_its_own_ray_with_room_for_the_weights_in_flight_and_ends_it(ray, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    before = dict(os.environ)
    _, leave = join(10**9, ray_workers=3, max_staleness=1)
    (address, settings), = ray.calls
    assert address == "local" and settings["num_cpus"] == 3 and settings["include_dashboard"] is False
    assert ray.seen["PYTHONPATH"].split(os.pathsep)[0] == ROOT, "workers import this repository"
    assert ray.seen["RAY_AUTH_MODE"] == "token" and len(ray.seen["RAY_AUTH_TOKEN"]) == 64
    assert settings["object_store_memory"] == LEAST_STORE + 3.3e9 and ray.seen["RAY_worker_niceness"] == "0"
    assert ray.seen["RAY_USAGE_STATS_ENABLED"] == "0", "nothing is sent to the makers of Ray"
    assert dict(os.environ) == before, "what is set for Ray is set for it alone"
    _, leave_again = join()
    leave_again()
    assert ray.up and len(ray.calls) == 1, "a Ray that the caller has started is used and stays open"
    leave()
    assert not ray.up


def test_a_cluster_is_joined_at_its_address(ray, monkeypatch):
    monkeypatch.setattr(ray_cluster, "JOIN", "")
    join(ray_address="10.1.1.1:6379")
    (address, settings), = ray.calls
    assert "RAY_AUTH_TOKEN" not in ray.seen, "the cluster's is in its own environment, or in the home folder"
    assert address == "10.1.1.1:6379" and "num_cpus" not in settings and "object_store_memory" not in settings
    assert settings["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep)[0] == ROOT


@pytest.mark.parametrize("program, fault", [
    ("import time; time.sleep(3600)", "nothing within 0.1 seconds"),
    (ray_cluster.JOIN, "ConnectionRefusedError: .*")])  # at once: Ray itself would try for minutes
def test_a_cluster_that_does_not_answer_is_named_within_a_limit(ray, monkeypatch, program, fault):
    monkeypatch.setattr(ray_cluster, "JOIN", program)
    monkeypatch.setattr(ray_cluster, "JOIN_SECONDS", 0.1 if "sleep" in program else 60)
    with pytest.raises(SamplerError, match=fr"=127.0.0.1:1: no Ray cluster answers there \({fault}\); start one"):
        join(ray_address="127.0.0.1:1")
    assert not ray.calls


def test_a_ray_that_cannot_start_is_one_line(ray):
    ray.error = RuntimeError("Failed to start GCS\nno port")
    with pytest.raises(SamplerError, match=r"^sampler='ray': Ray cannot start on this machine \(no port\)$"):
        join()


def test_without_the_package_the_pip_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="sampler='ray' needs the package ray: pip install ray"):
        join()


@pytest.mark.parametrize("settings, threads", [
    ({}, 12), ({"ray_workers": 2}, 6), ({"max_staleness": 1}, 6), ({"ray_workers": 20}, 1),
    ({"ray_workers": 2, "ray_address": "auto"}, 12)])
def test_workers_share_the_threads_with_each_other_and_ahead_with_the_trainer(ray, monkeypatch, settings, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    c = prompt_config(sampler="ray", **settings)
    assert threads_of_worker(c) == threads
    assert worker_options(ray, c, one_process())["num_cpus"] == threads


@pytest.mark.parametrize("gpus, address, share", [(1.0, None, 0.5), (8.0, None, 1.0),
                                                  (2.0, "auto", 0.25), (3.0, "auto", 1 / 3), (8.0, "auto", 1.0)])
def test_two_workers_of_each_of_four_ranks_share_the_gpus_that_ray_has(ray, gpus, address, share):
    dist = SimpleNamespace(device=torch.device("cuda"), world=4)
    ray.gpus = gpus
    c = prompt_config(sampler="ray", ray_workers=2, ray_address=address)
    assert worker_options(ray, c, dist)["num_gpus"] == share


@pytest.mark.parametrize("visible, rank, ranks, index, names", [
    ("", 0, 1, 0, ["1", "2", "3"]), ("", 0, 1, 2, ["0", "1", "3"]), ("7", 0, 1, 0, ["7"]),
    ("", 0, 2, 0, ["2"]), ("", 1, 2, 1, ["3"]), ("4,5,6", 1, 3, 1, ["5"])])
def test_workers_get_the_gpus_that_no_rank_trains_on_else_those_of_their_rank(monkeypatch, visible, rank, ranks, index,
                                                                              names):
    for name, x in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)):
        monkeypatch.setenv(name, str(x))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert gpus_beside(SimpleNamespace(device=torch.device("cuda", index))) == names
