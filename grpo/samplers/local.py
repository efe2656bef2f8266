"""The sampler in this process: the policy itself."""

from collections import deque

from grpo.samplers.sampler import SamplerOutput


class LocalSampler:
    """Samples as soon as it is asked to start. With max_staleness above 0 its rollouts are as old as those of a sampler
    that runs beside training, but nothing is faster."""

    outside = False

    def __init__(self, policy, config):
        self.policy, self.config = policy, config
        self.outputs = deque()

    def start(self, problems, iteration, version):
        self.outputs.append(SamplerOutput(self.policy.sample(problems, iteration, self.config), version))

    def finish(self):
        return self.outputs.popleft()

    def sync(self, weights, version):
        """The policy has its weights already."""

    def score(self, problems, written):
        """There are no other weights than the policy's."""
        return lambda: []

    def close(self):
        self.outputs.clear()
