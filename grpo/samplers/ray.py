"""sampler='ray': samples in Ray workers, on this machine or in a cluster. Needs the optional package ray."""

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
from core.models import is_small, multiplied_weights
from core.resume import resume_command
from core.settings.optional import require
from grpo.build import load_policy_model
from grpo.environments import WARNED, warn
from grpo.rollout import join
from grpo.samplers.sampler import LONGEST_CALL, with_ties
from grpo.sampling_settings import SamplingSettings

START_SECONDS = 300  # time limit for a worker to import and load its model
MOST_TRIES = 5       # attempts to sample the same problems if workers die
ADDRESS = "RAY_ADDRESS"  # Ray's environment variable that names a cluster: host:port, or auto
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # a worker is not one of the trainer's ranks
VARIABLES = {  # environment variables of a Ray that this run starts
    # Ray listens on all interfaces and runs any code sent to it, so it requires a token that only this run knows
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # With the default niceness of 15, workers would yield to every other process on the machine
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0"}
QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
FEWER = "lower ray_workers, or OMP_NUM_THREADS (CPUs per worker)"


def check(config):
    require_ray()


def build(policy, config, dist):
    config = replace(config, parallel="ddp", device=dist.device.type)  # a worker is one process on one GPU
    name = config.unmask_order
    order = {name: UNMASK_ORDERS[name]}  # a config file may define the function, and workers do not run config files
    with others(f"the function of unmask_order={name!r} cannot be sent to a worker",
                "let it use nothing but numbers, tensors and modules", definition(order[name])):
        require_ray().cloudpickle.dumps(order)
    threads = threads_of_worker(config)
    make = partial(policy_of_worker, type(policy), policy.tokenizer, threads, order)
    return RaySampler(make, policy, config, dist)


def require_ray():
    return require("ray", "sampler='ray'", "ray")


def policy_of_worker(kind, tokenizer, threads, order, config):
    """Makes the policy of a worker, with the initial weights of the run.
    kind: the class of the policy; order: a row of UNMASK_ORDERS"""
    os.environ.update(ONE_PROCESS)
    UNMASK_ORDERS.update(order)
    libraries_first()
    torch.set_num_threads(threads)
    dist = Distributed(config.device, config.dtype, is_small(config.generator_checkpoint))
    model = load_policy_model("generator_checkpoint", config, tokenizer, dist, adapter=config)
    return kind(model, tokenizer, dist.dtype, config.grad_checkpoint)


class RayWorker:
    """A worker with a policy, make(config). Every call receives the weights, because Ray may have restarted the worker
    since the last call."""

    def __init__(self, make, config):
        self.policy = make(config)
        self.settings = SamplingSettings.of(config)
        self.version = None  # of the weights

    def ready(self):
        """Returns once the policy is built."""

    def sample(self, problems, iteration, version, packed):
        """Returns Rollouts on the CPU and the warnings about environments, which Ray does not show."""
        if version != self.version:
            weights = {}
            for name, x in self.policy.weights().items():
                dtype, data = packed[name]
                data = torch.from_numpy(data.copy())  # Ray's own memory is read-only
                weights[name] = data.view(dtype).view(x.shape)
            self.policy.load_weights(weights)
            self.version = version
        rollouts = self.policy.sample(problems, iteration, self.settings)
        return moved(rollouts, "cpu"), dict(WARNED)


class RaySampler:
    """Splits the problems among workers with copies of the policy. Ray restarts dead workers and repeats their work.

    make: config -> policy, importable by the workers, which call it
    policy: the trainer's policy
    """

    def __init__(self, make, policy, config, dist):
        self.policy = policy
        self.config = config
        self.starts = deque()  # for each unfinished start, object references of RayWorker.sample results
        self.weights = None    # (version, object reference of packed weights) of the last sync
        self.workers = []
        self.out_dir = config.absolute_out_dir
        self.ray = require_ray()
        self.connects = not self.ray.is_initialized()  # otherwise the caller connected to Ray and will disconnect
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)  # unless the block reaches pop_all
            if self.connects:
                join_ray(self.ray, config, dist)
            options = worker_options(self.ray, config, dist)
            actor = self.ray.remote(**options)(RayWorker)
            for _ in range(config.ray_workers):
                self.workers.append(actor.remote(make, config))
            ready = [worker.ready.remote() for worker in self.workers]
            self._wait_for(ready, START_SECONDS, FEWER)
            undo.pop_all()

    def sync(self, weights, version):
        dtype = self.policy.dtype
        if self.config.has_adapter:  # peft adds that of stacked experts in float32; adapters are small
            dtype = torch.float32
        packed = pack(weights, self.policy.model, dtype)
        self.weights = version, self.ray.put(packed)

    def start(self, problems, iteration):
        answers = []
        rows = np.arange(len(problems["number"]))
        shares = np.array_split(rows, len(self.workers))
        for worker, share in zip(self.workers, shares, strict=True):
            if len(share):
                part = {key: x[share] for key, x in problems.items()}
                answer = worker.sample.remote(part, iteration, *self.weights)
                answers.append(answer)
        self.starts.append(answers)

    def finish(self):
        again = "start again"
        if states(self.out_dir):
            again = f"resume with {resume_command(self.out_dir)}"
        remedy = f"lower batch_size or max_new_tokens and {again}"
        answers = self.starts.popleft()
        parts = []
        for rollouts, warnings in self._wait_for(answers, LONGEST_CALL, remedy):
            parts.append(rollouts)
            for key, line in warnings.items():
                warn(key, line)
        return moved(join(parts), self.policy.device)

    def close(self):
        with contextlib.suppress(self.ray.exceptions.RayError):  # it would hide the error that ended the run
            for worker in self.workers:
                self.ray.kill(worker)
        self.workers = []
        if self.connects:
            self.ray.shutdown()

    def _wait_for(self, answers, seconds, remedy):
        """Returns the results of worker calls. Raises Mistake if workers are late, fail, or die too often."""
        try:
            return self.ray.get(answers, timeout=seconds)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Mistake):
                raise Mistake(f"a worker of sampler='ray' failed: {error.cause}") from None
            raise  # a bug, with the traceback of the worker
        except self.ray.exceptions.RayError as error:
            raise Mistake(f"a worker of sampler='ray' failed or took more than {seconds:g} seconds: "
                          f"{last_line(error)}; {remedy}") from None


def pack(weights, model, dtype):
    """Converts {name: tensor} to {name: (dtype, numpy bytes)}, which Ray's object store shares between processes
    without a copy. The weights of linear layers are cast to dtype, in which workers multiply: autocast would round
    them to the same numbers."""
    multiplied = {p.data_ptr() for p in multiplied_weights(model)}

    def packed(x):
        own = dtype if x.data_ptr() in multiplied else x.dtype
        x = x.detach().to("cpu", own, copy=True)  # a copy: FSDP cannot free a storage shared with numpy
        flat = x.reshape(-1).view(torch.uint8)
        return own, flat.numpy()

    return with_ties(packed, weights)


def join_ray(ray, config, dist):
    """Joins the cluster at RAY_ADDRESS, or starts a Ray for this rank only."""
    address = cluster()
    path = ROOT
    if os.environ.get("PYTHONPATH"):
        path += os.pathsep + os.environ["PYTHONPATH"]
    variables = {"PYTHONPATH": path}
    try:
        if address:
            ray.init(address, runtime_env={"env_vars": variables}, **QUIET)
            return
        gpus = gpus_beside(dist)
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        cpus = config.ray_workers * threads_of_worker(config)
        start_ray(ray, variables, num_cpus=cpus, num_gpus=len(gpus))
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise Mistake(f"sampler='ray': no Ray at {ADDRESS}={address} ({last_line(error)}); docs/scaling.md has "
                      "the command for a cluster") from None


def cluster():
    """Returns the address of the cluster to join, or "" if this run starts its own Ray ("local" in Ray)."""
    address = os.environ.get(ADDRESS, "")
    if address == "local":
        return ""
    return address


def start_ray(ray, variables, **settings):
    """Starts a Ray with these environment variables. Only processes of this run can join it."""
    before = dict(os.environ)
    os.environ.update(VARIABLES | variables)
    try:
        ray._raylet.Config.initialize("")  # again: Ray read RAY_AUTH_MODE on import
        ray.init("local", include_dashboard=False, **settings, **QUIET)
    finally:
        os.environ.clear()
        os.environ.update(before)


def gpus_beside(dist):
    """Returns the GPUs for the workers of this rank: its share of the GPUs that no rank trains on, or its own GPU."""
    if dist.device.type != "cuda":
        return []
    names = [str(i) for i in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        names = visible.split(",")
    rank = int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    spare = names[ranks:]
    share = spare[rank::ranks]
    if share:
        return share
    return [names[dist.device.index]]


def worker_options(ray, config, dist):
    """Returns Ray's options for a worker: its number of CPUs and its share of a GPU."""
    options = {
        "num_cpus": threads_of_worker(config),
        "max_restarts": -1,  # any number
        "max_task_retries": MOST_TRIES - 1}
    gpus = 0
    if dist.device.type == "cuda":
        gpus = ray.cluster_resources().get("GPU", 0)
    if gpus:
        workers = config.ray_workers
        if cluster():  # the ranks share its GPUs
            workers *= dist.world
        workers_of_gpu = math.ceil(workers / gpus)  # rounded up, so that no worker spans two GPUs
        options["num_cpus"] = 1
        options["num_gpus"] = 1 / workers_of_gpu
    return options


def threads_of_worker(config):
    """Returns the number of threads of a worker. On this machine the workers share all threads; with max_staleness,
    also with the trainer."""
    busy = 1
    if not cluster():
        busy = config.ray_workers + (config.max_staleness > 0)
    return max(1, torch.get_num_threads() // busy)


def last_line(error):
    """Returns the last line of an error: Ray puts the worker's traceback before it."""
    lines = str(error).strip().split("\n")
    return one_line(lines[-1]) or type(error).__name__
