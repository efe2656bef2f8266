"""Starts a Ray of its own, or joins a cluster. Needs the optional package ray."""

import contextlib
import logging
import math
import os

import torch

from core.optional import require
from core.user_code import ROOT
from grpo.samplers.sampler import SamplerError

LEAST_STORE = 2**27  # bytes of the object store; Ray refuses less than 75 MB
OWN = {"RAY_USAGE_STATS_ENABLED": "0",
       "RAY_worker_niceness": "0"}  # Ray's own is 15: workers would wait for every other process of the machine


def joined_ray(config, dist, weights_bytes):
    """The package ray, connected; and a function without arguments that disconnects it and ends what was started here.

    Each rank of a run starts a Ray of its own, so that none depends on when another ends. weights_bytes: size of the
    weights that a sync brings. Raises SamplerError if no cluster answers at ray_address
    """
    ray = require("ray", "sampler='ray'", "-r requirements-ray.txt")
    if ray.is_initialized():  # the caller's own: it also ends it
        return ray, lambda: None
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    code = {"PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))}
    if config.ray_address is None:
        store = LEAST_STORE + int(1.1 * weights_bytes * (config.max_staleness + 2))
        gpus = gpus_beside(dist)
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        with environment(code | seen | OWN):
            ray.init("local", num_cpus=config.ray_workers, num_gpus=len(gpus), include_dashboard=False,
                     object_store_memory=store, **quiet)
        return ray, ray.shutdown
    try:
        ray.init(config.ray_address, runtime_env={"env_vars": code}, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SamplerError(f"ray_address={config.ray_address}: no Ray cluster answers there ({one_line(error)}); start "
                           "one with ray start --head, with RAY_AUTH_MODE=token in the environment of both if it asks "
                           "for a token, or leave ray_address out") from None
    return ray, ray.shutdown


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


@contextlib.contextmanager
def environment(variables):
    """Within, what is started sees these variables {name: text}."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in variables.keys() & before.keys()})


def worker_options(ray, config, dist):
    """What Ray must know of a worker. One with its own environment could not be a process that Ray has ready."""
    workers = config.ray_workers * (1 if config.ray_address is None else dist.world)  # who share what this Ray has
    gpus = ray.cluster_resources().get("GPU", 0) if dist.device.type == "cuda" else 0
    share = 1 / math.ceil(workers / gpus) if gpus else 0  # a worker cannot have halves of two GPUs
    return {"num_cpus": 1, "num_gpus": share, "max_restarts": 0}


def threads_of_worker(config):
    """Threads that a worker computes with: on this machine its share, because the workers compute at the same time and,
    ahead of training, with the trainer, which keeps all of its own; in a cluster as many as the trainer."""
    busy = config.ray_workers + (config.max_staleness > 0) if config.ray_address is None else 1
    return max(1, torch.get_num_threads() // busy)


def one_line(error):
    """The last line of an error's text: Ray puts the worker's traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
