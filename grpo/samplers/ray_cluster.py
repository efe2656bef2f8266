"""Starts a Ray of its own, or joins a cluster. Needs the optional package ray."""

import contextlib
import logging
import math
import os
import secrets
import subprocess
import sys

import torch

from core.settings.optional import require
from core.settings.user_code import ROOT, one_line
from grpo.samplers.sampler import SamplerError

LEAST_STORE = 2**27  # bytes of the object store; Ray refuses less than 75 MB
MOST_TRIES = 5       # of the same problems, by a worker that dies each time
# A Ray listens on all interfaces of the machine and runs what it is sent: only processes of this run know the token.
# Ray's own niceness is 15: workers would wait for every other process of the machine
OWN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
       "RAY_worker_niceness": "0"}
QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
JOIN = """
import socket, sys
host, _, port = sys.argv[1].rpartition(":")
if host:  # Ray asks for minutes where nobody listens
    socket.create_connection((host.strip("[]"), port), timeout=30).close()
import ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
"""
JOIN_SECONDS = 120  # a cluster that is there answers within ten, on a busy machine within a hundred


def joined_ray(config, dist, weights_bytes):
    """The package ray, connected; and a function without arguments that disconnects it and ends what was started here.

    Each rank of a run starts a Ray of its own, so that none depends on when another ends. weights_bytes: size of the
    weights that a sync brings. Raises SamplerError if no cluster answers at ray_address
    """
    ray = require("ray", "sampler='ray'", "ray")
    if ray.is_initialized():  # the caller's own: it also ends it
        return ray, lambda: None
    code = {"PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))}
    if config.ray_address is not None:
        check_cluster(config.ray_address)
        ray.init(config.ray_address, runtime_env={"env_vars": code}, **QUIET)
        return ray, ray.shutdown
    store = LEAST_STORE + int(1.1 * weights_bytes * (config.max_staleness + 2))
    gpus = gpus_beside(dist)
    if gpus:
        code["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    cpus = config.ray_workers * threads_of_worker(config)
    try:
        start_ray(ray, code, num_cpus=cpus, num_gpus=len(gpus), object_store_memory=store)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise SamplerError(f"sampler='ray': Ray cannot start on this machine ({last_line(error)})") from None
    return ray, ray.shutdown


def start_ray(ray, variables, **settings):
    """Starts a Ray on this machine that only processes of this run can join, with these environment variables."""
    with environment(OWN | variables):
        ray._raylet.Config.initialize("")  # Ray has read RAY_AUTH_MODE when it was imported
        ray.init("local", include_dashboard=False, **settings, **QUIET)


@contextlib.contextmanager
def environment(variables):
    """Sets variables {name: text} for what is started within."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_cluster(address):
    """Raises SamplerError if no cluster answers there. It is tried in a process that can be ended: Ray itself waits for
    minutes, or without end, and nothing interrupts it."""
    try:
        done = subprocess.run([sys.executable, "-c", JOIN, address], capture_output=True, text=True,
                              timeout=JOIN_SECONDS)
        if done.returncode == 0:
            return
        fault = last_line(done.stderr)
    except subprocess.TimeoutExpired:
        fault = f"nothing within {JOIN_SECONDS} seconds"
    raise SamplerError(f"ray_address={address}: no Ray cluster answers there ({fault}); start one with ray start "
                       "--head, which prints its host:port, with RAY_AUTH_MODE=token in the environment of both if it "
                       "asks for a token, or leave ray_address out")


def gpus_beside(dist):
    """The names of the GPUs for the workers of this rank: its share of those that no rank trains on, else its own."""
    if dist.device.type != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    taken = range(ranks) if ranks > 1 else [dist.device.index]
    free = [name for i, name in enumerate(names) if i not in taken]
    return free[rank::ranks] or [names[dist.device.index]]


def worker_options(ray, config, dist):
    """Ray's options for a worker. One with its own environment could not be a process that Ray has ready."""
    workers = config.ray_workers
    if config.ray_address is not None:
        workers *= dist.world  # the ranks share a cluster
    cpus, share = threads_of_worker(config), 0
    gpus = 0
    if dist.device.type == "cuda":
        gpus = ray.cluster_resources().get("GPU", 0)
    if gpus:
        cpus, share = 1, 1 / math.ceil(workers / gpus)  # a worker cannot have halves of two GPUs
    return {"num_cpus": cpus, "num_gpus": share, "max_restarts": -1, "max_task_retries": MOST_TRIES - 1}


def threads_of_worker(config):
    """Threads that a worker computes with: on this machine its share, because the workers compute at the same time and,
    ahead of training, with the trainer, which keeps all of its own; in a cluster as many as the trainer."""
    busy = 1
    if config.ray_address is None:
        busy = config.ray_workers + (config.max_staleness > 0)
    return max(1, torch.get_num_threads() // busy)


def last_line(error):
    """The last line of what an error says: Ray puts the worker's traceback before it."""
    return one_line(str(error).strip().rpartition("\n")[2]) or type(error).__name__
