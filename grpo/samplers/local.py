"""The sampler in this process: the policy itself."""

from collections import deque

from grpo.samplers.sampler import Finished


class LocalSampler:
    """Writes when it is asked to start. Ahead of training, its rollouts are as old as those of a sampler that writes
    while the policy is trained, but nothing is faster."""

    outside = False

    def __init__(self, policy, config):
        self.policy, self.config, self.finished = policy, config, deque()

    def start(self, problems, iteration, version):
        self.finished.append(Finished(self.policy.sample(problems, iteration, self.config), version))

    def finish(self):
        return self.finished.popleft()

    def sync(self, weights, version):
        """The policy has its weights already."""

    def score(self, problems, written):
        """There are no other weights than the policy's."""
        return lambda: []

    def close(self):
        self.finished.clear()
