"""The worker process of Ray: a policy that samples completions."""

import secrets
from dataclasses import replace

import torch

from grpo.rollout import moved
from grpo.scoring import score_in_batches


class RayWorker:
    """Calls run one after another. Each brings the weights that it needs, so that a worker that Ray has started again
    knows as much as the one before.

    make: config -> policy
    """

    def __init__(self, make, config):
        self.policy, self.config = make(config), config
        self.name = secrets.token_hex(8)  # of this process
        self.version = None               # of the weights

    def ready(self):
        return self.name

    def sample(self, problems, iteration, version, packed):
        """Returns Rollouts, on the CPU, and the name of the process."""
        self.load(version, packed)
        return moved(self.policy.sample(problems, iteration, self.config), "cpu"), self.name

    @torch.no_grad()
    def score(self, rollouts, version, packed):
        """(N, M) log-probabilities of completions at temperature 1, on the CPU."""
        self.load(version, packed)
        rollouts = moved(rollouts, self.policy.device)
        return score_in_batches(self.policy, rollouts, replace(self.config, temperature=1.0)).cpu()

    def load(self, version, packed):
        """Takes over weights as `pack` gave them, unless it has this version."""
        if version == self.version:
            return
        weights = {}
        for name, x in self.policy.weights().items():
            weights[name] = torch.from_numpy(packed[name].copy()).view(x.dtype).view(x.shape)
        self.policy.load_weights(weights)
        self.version = version


def pack(weights):
    """{name: bytes as numpy} of {name: tensor}, which Ray's object store shares between processes without a copy."""
    packed = {}
    for name, x in weights.items():
        x = x.detach().to("cpu", copy=True)  # FSDP could not free a storage that numpy has seen
        packed[name] = x.reshape(-1).view(torch.uint8).numpy()
    return packed
