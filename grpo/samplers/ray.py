"""sampler='ray': worker processes of Ray sample, on this machine or in a cluster. Needs the optional package ray."""

import contextlib
import logging
import math
import os
import secrets
from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from core.checkpoint_manager import states
from core.device import moved
from core.distributed import Distributed
from core.errors import ROOT, Mistake, definition, libraries_first, one_line, others
from core.fill_in import UNMASK_ORDERS
from core.models import is_small
from core.resume import resume_command
from core.settings.optional import require
from grpo.build import load_policy_model
from grpo.environments import WARNED, warn
from grpo.rollout import join
from grpo.samplers.sampler import LONGEST_CALL
from grpo.sampling_settings import SamplingSettings

START_SECONDS = 300  # for a worker to import and to load its model
MOST_TRIES = 5       # of the same problems, by workers that die
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # a worker is no rank of the trainer's
# Ray listens on all interfaces and runs what it is sent, so it takes a token that only this run knows.
# Ray's default niceness, 15, would make workers wait for every other process of the machine
OWN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
       "RAY_worker_niceness": "0"}
QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
FEWER = "lower ray_workers, or OMP_NUM_THREADS (CPUs per worker)"
ADDRESS = "RAY_ADDRESS"      # the variable, which Ray itself reads, that names a cluster: host:port, or auto


def check(config):
    require_ray()


def build(policy, config, dist):
    config = replace(config, parallel="ddp", device=dist.device.type)  # a worker is one process on one GPU
    name = config.unmask_order
    order = {name: UNMASK_ORDERS[name]}  # it may be that of a config file, which workers do not run
    with others(f"the function of unmask_order={name!r} cannot be sent to a worker",
                "let it use nothing but numbers, tensors and modules", definition(order[name])):
        require_ray().cloudpickle.dumps(order)
    make = partial(policy_of_worker, type(policy), policy.tokenizer, threads_of_worker(config), order)
    return RaySampler(make, policy, config, dist)


def require_ray():
    return require("ray", "sampler='ray'", "ray")


def policy_of_worker(kind, tokenizer, threads, order, config):
    """The policy in a worker, with the weights that the run started from.
    kind: its class; order: a row of UNMASK_ORDERS"""
    os.environ.update(ONE_PROCESS)
    UNMASK_ORDERS.update(order)
    libraries_first()
    torch.set_num_threads(threads)
    dist = Distributed(config.device, config.dtype, is_small(config.generator_checkpoint))
    model = load_policy_model("generator_checkpoint", config, tokenizer, dist, adapter=config)
    return kind(model, tokenizer, dist.dtype, config.grad_checkpoint)


class RayWorker:
    """The policy in a worker, make(config). Each call brings its weights, for a worker that Ray has restarted too."""

    def __init__(self, make, config):
        self.policy = make(config)
        self.settings = SamplingSettings.of(config)
        self.version = None  # of the weights

    def ready(self):
        """Returns once the policy is built."""

    def sample(self, problems, iteration, version, packed):
        """(Rollouts, on the CPU; what was said of environments, which Ray does not show)"""
        if version != self.version:
            weights = {}
            for name, x in self.policy.weights().items():
                weights[name] = torch.from_numpy(packed[name].copy()).view(x.dtype).view(x.shape)
            self.policy.load_weights(weights)
            self.version = version
        rollouts = self.policy.sample(problems, iteration, self.settings)
        return moved(rollouts, "cpu"), dict(WARNED)


class RaySampler:
    """Workers with copies of the policy share the problems. Ray restarts one that died and repeats its work.

    make: config -> policy, called in each worker, which imports it
    policy: the trainer's
    """

    def __init__(self, make, policy, config, dist):
        self.policy, self.config = policy, config
        self.starts = deque()  # for each start the object references of RayWorker.sample
        self.weights = None    # (version, object reference of packed weights) of the last sync
        self.workers = []
        self.out_dir = config.absolute_out_dir
        self.ray = require_ray()
        self.joined = not self.ray.is_initialized()  # otherwise the caller started it, and ends it
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if self.joined:
                join_ray(self.ray, config, dist)
            actor = self.ray.remote(**worker_options(self.ray, config, dist))(RayWorker)
            self.workers = [actor.remote(make, config) for _ in range(config.ray_workers)]
            self._values([worker.ready.remote() for worker in self.workers], START_SECONDS, FEWER)
            undo.pop_all()

    def sync(self, weights, version):
        self.weights = version, self.ray.put(pack(weights))

    def start(self, problems, iteration):
        answers = []
        shares = np.array_split(np.arange(len(problems["number"])), len(self.workers))
        for worker, share in zip(self.workers, shares, strict=True):
            if len(share):
                part = {key: x[share[0] : share[-1] + 1] for key, x in problems.items()}
                answers.append(worker.sample.remote(part, iteration, *self.weights))
        self.starts.append(answers)

    def finish(self):
        again = f"resume with {resume_command(self.out_dir)}" if states(self.out_dir) else "start again"
        remedy = f"lower batch_size or max_new_tokens and {again}"
        parts = []
        for rollouts, said in self._values(self.starts.popleft(), LONGEST_CALL, remedy):
            parts.append(rollouts)
            for key, line in said.items():
                warn(key, line)
        return moved(join(parts), self.policy.device)

    def close(self):
        with contextlib.suppress(self.ray.exceptions.RayError):  # it would hide the error that ended the run
            for worker in self.workers:
                self.ray.kill(worker)
        self.workers = []
        if self.joined:
            self.ray.shutdown()

    def _values(self, answers, seconds, remedy):
        """Returns what workers return. Raises Mistake if they are late, fail, or die too often."""
        try:
            return self.ray.get(answers, timeout=seconds)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Mistake):
                raise Mistake(f"a worker of sampler='ray' failed: {error.cause}") from None
            raise  # a bug, with the traceback of the worker
        except self.ray.exceptions.RayError as error:
            raise Mistake(f"a worker of sampler='ray' failed or took more than {seconds:g} seconds: "
                          f"{last_line(error)}; {remedy}") from None


def pack(weights):
    """{name: tensor} as {name: numpy bytes}, which Ray's object store shares between processes without a copy."""
    packed = {}
    for name, x in weights.items():
        x = x.detach().to("cpu", copy=True)  # FSDP could not free a storage that numpy has seen
        packed[name] = x.reshape(-1).view(torch.uint8).numpy()
    return packed


def join_ray(ray, config, dist):
    """Joins the cluster at RAY_ADDRESS, or starts a Ray for this rank alone."""
    address = cluster()
    code = {"PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))}
    try:
        if address:
            ray.init(address, runtime_env={"env_vars": code}, **QUIET)
        else:
            gpus = gpus_beside(dist)
            if gpus:
                code["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
            start_ray(ray, code, num_cpus=config.ray_workers * threads_of_worker(config), num_gpus=len(gpus))
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise Mistake(f"sampler='ray': no Ray at {ADDRESS}={address} ({last_line(error)}); docs/scaling.md has "
                      "the command for a cluster") from None


def cluster():
    """The address of the cluster to join, or "" for a Ray of this run's own, which Ray itself calls local."""
    address = os.environ.get(ADDRESS, "")
    return "" if address == "local" else address


def start_ray(ray, variables, **settings):
    """Starts a Ray with these environment variables, which only processes of this run can join."""
    before = dict(os.environ)
    os.environ.update(OWN | variables)
    try:
        ray._raylet.Config.initialize("")  # Ray read RAY_AUTH_MODE when it was imported
        ray.init("local", include_dashboard=False, **settings, **QUIET)
    finally:
        os.environ.clear()
        os.environ.update(before)


def gpus_beside(dist):
    """The GPUs for the workers of this rank: its share of those behind the ranks' own, else its own."""
    if dist.device.type != "cuda":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    rank = int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return names[ranks:][rank::ranks] or [names[dist.device.index]]


def worker_options(ray, config, dist):
    """Ray's options for a worker: its threads, or its share of a GPU."""
    options = {"num_cpus": threads_of_worker(config), "max_restarts": -1, "max_task_retries": MOST_TRIES - 1}
    gpus = ray.cluster_resources().get("GPU", 0) if dist.device.type == "cuda" else 0
    if gpus:
        workers = config.ray_workers * (dist.world if cluster() else 1)  # the ranks share a cluster
        options |= {"num_cpus": 1, "num_gpus": 1 / math.ceil(workers / gpus)}  # no worker has halves of two GPUs
    return options


def threads_of_worker(config):
    """Threads of a worker. On this machine all workers and, with max_staleness, the trainer share them."""
    busy = 1
    if not cluster():
        busy = config.ray_workers + (config.max_staleness > 0)
    return max(1, torch.get_num_threads() // busy)


def last_line(error):
    """The last line of what an error says: Ray puts the worker's traceback before it."""
    return one_line(str(error).strip().rpartition("\n")[2]) or type(error).__name__
