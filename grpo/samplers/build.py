"""The sampler of a config, and the policy of its workers."""

import os
from dataclasses import replace
from functools import partial

import torch

from core.distributed import Distributed
from core.settings.optional import require
from grpo.build import load_policy

ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # a worker is no rank of the trainer's


def check_sampler_is_there(config):
    """Raises ValueError if the sampler's package is not installed or its server does not answer. Nothing is started."""
    if config.sampler == "ray":
        require("ray", "sampler='ray'", "ray")
    if config.sampler == "vllm":
        from grpo.samplers.vllm_http import Server
        Server(config.vllm_url, config.sampler_timeout).ask("GET", "/v1/models")


def build_sampler(config, policy, dist):
    """The sampler that the config names; None: the policy itself samples."""
    if config.sampler == "ray":
        from grpo.samplers.ray import RaySampler, threads_of_worker
        config = replace(config, parallel="ddp", device=dist.device.type)  # a worker is one process on one GPU
        make = partial(policy_of_worker, policy.tokenizer, threads_of_worker(config))
        return RaySampler(make, policy, config, dist)
    if config.sampler == "vllm":
        from grpo.samplers.vllm import VllmSampler
        return VllmSampler(policy, config, dist)
    return None


def policy_of_worker(tokenizer, threads, config):
    """The policy with the weights that the run started from, in a worker."""
    os.environ.update(ONE_PROCESS)
    torch.set_num_threads(threads)
    dist = Distributed(config.device, config.dtype)
    return load_policy("generator_checkpoint", config, tokenizer, dist, adapter=config)
