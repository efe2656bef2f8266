"""How a run comes to its Ray: its own, its caller's, or a cluster."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo.samplers import ray_cluster
from grpo.samplers.ray_cluster import (LEAST_STORE, check_cluster, environment, gpus_beside, joined_ray, last_line,
                                       threads_of_worker, worker_options)
from grpo.samplers.sampler import SamplerError
from tests.tiny import ROOT, one_process, prompt_config


class RayStub:
    """The calls of ray.init, and whether it has been shut down."""

    exceptions = SimpleNamespace(RayError=OSError)
    _raylet = SimpleNamespace(Config=SimpleNamespace(initialize=str))

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


def test_a_run_starts_its_own_ray_with_room_for_the_weights_in_flight_and_ends_it(stub, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    ray = stub()
    _, leave = joined_ray(ray_config(ray_workers=3, max_staleness=1), one_process(), 10**9)
    (address, settings), = ray.calls
    assert address == "local" and settings["num_cpus"] == 3 and settings["include_dashboard"] is False
    assert ray.seen["PYTHONPATH"].split(os.pathsep)[0] == ROOT, "workers import this repository"
    assert ray.seen["RAY_AUTH_MODE"] == "token" and len(ray.seen["RAY_AUTH_TOKEN"]) == 64
    assert settings["object_store_memory"] == LEAST_STORE + 3.3e9 and ray.seen["RAY_worker_niceness"] == "0"
    assert ray.seen["RAY_USAGE_STATS_ENABLED"] == "0", "nothing is sent to the makers of Ray"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1", "what is set for Ray is set for it alone"
    leave()
    assert not ray.up


def test_a_cluster_is_joined_at_its_address(stub, monkeypatch):
    ray = stub()
    monkeypatch.setattr(ray_cluster, "JOIN", "")
    joined_ray(ray_config(ray_address="10.1.1.1:6379"), one_process(), 0)
    (address, settings), = ray.calls
    assert "RAY_AUTH_TOKEN" not in ray.seen, "the cluster's is in its own environment, or in the home folder"
    assert address == "10.1.1.1:6379" and "num_cpus" not in settings and "object_store_memory" not in settings
    assert settings["runtime_env"]["env_vars"]["PYTHONPATH"].split(os.pathsep)[0] == ROOT


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "a b\nc", "127.0.0.1:99999", "localhost", "host:0", ""])
def test_what_is_no_address_is_refused_at_once(stub, address):
    ray = stub()
    with pytest.raises(SamplerError, match="is neither host:port nor auto") as error:
        joined_ray(ray_config(ray_address=address), one_process(), 0)
    assert "\n" not in str(error.value) and not ray.calls


@pytest.mark.parametrize(("join", "fault"), [
    ("import time; time.sleep(3600)", "nothing within 1 seconds"),
    ("raise ConnectionError('first\\nsecond ' + __import__('sys').argv[1])", "second 10.1.1.1:6379")])
def test_a_cluster_that_does_not_answer_is_named_within_a_limit(stub, monkeypatch, join, fault):
    ray = stub()
    monkeypatch.setattr(ray_cluster, "JOIN", join)
    monkeypatch.setattr(ray_cluster, "JOIN_SECONDS", 1 if "sleep" in join else 60)
    with pytest.raises(SamplerError, match=fr"address=10.1.1.1:6379: no Ray cluster answers there \({fault}\); start"):
        joined_ray(ray_config(ray_address="10.1.1.1:6379"), one_process(), 0)
    assert not ray.calls


def test_a_ray_that_cannot_start_is_one_line(stub):
    stub(error=RuntimeError("Failed to start GCS\nno port"))
    with pytest.raises(SamplerError, match=r"^sampler='ray': Ray cannot start on this machine \(no port\)$"):
        joined_ray(ray_config(), one_process(), 0)


@pytest.mark.slow
def test_a_server_that_is_no_ray_is_refused(monkeypatch):
    """It takes connections and says nothing, as a garbage server may."""
    pytest.importorskip("ray")
    monkeypatch.setattr(ray_cluster, "JOIN_SECONDS", 5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(SamplerError, match="no Ray cluster answers there"):
            check_cluster(f"127.0.0.1:{server.getsockname()[1]}")


OUTSIDER = "import sys, ray; ray.init(sys.argv[1]); print(ray.get(ray.remote(num_cpus=0)(lambda: 'code ran').remote()))"


@pytest.mark.slow
def test_an_outsider_cannot_join_the_ray_of_a_run_even_where_authentication_is_off(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray, leave = joined_ray(ray_config(), one_process(), 0)
    try:
        address = ray.get_runtime_context().gcs_address
        outsider = subprocess.run([sys.executable, "-c", OUTSIDER, address], capture_output=True, text=True)
    finally:
        leave()
    assert outsider.returncode == 1 and "code ran" not in outsider.stdout
    assert "InvalidAuthToken" in outsider.stdout + outsider.stderr


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


def test_a_worker_takes_as_many_cpus_of_a_cluster_as_it_has_threads(stub, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    for address, device, cpus in ((None, "cpu", 1), ("auto", "cpu", 12), ("auto", "cuda", 1)):
        dist = SimpleNamespace(device=torch.device(device), world=1)
        assert worker_options(stub(), ray_config(ray_address=address), dist)["num_cpus"] == cpus


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


@pytest.mark.parametrize("text, line", [("", "RuntimeError"), ("a\n  b \n\n", "b"), ("x" * 999, "x" * 300 + "...")])
def test_an_error_of_ray_becomes_its_last_line(text, line):
    assert last_line(RuntimeError(text)) == line
