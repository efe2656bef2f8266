"""Sampling ahead of training in this process, by the policy itself."""

from collections import deque


class LocalSampler:
    """Samples as soon as it is asked to start: as far ahead as a sampler elsewhere, but not at the same time."""

    def __init__(self, policy, config):
        self.policy, self.config = policy, config
        self.rollouts = deque()

    def start(self, problems, iteration):
        self.rollouts.append(self.policy.sample(problems, iteration, self.config))

    def finish(self):
        return self.rollouts.popleft()

    def sync(self, weights, version):
        """The policy has its weights already."""

    def close(self):
        self.rollouts.clear()
