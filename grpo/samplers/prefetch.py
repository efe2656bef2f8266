"""Sampling ahead of training: a sampler, or the policy itself, starts later iterations before they are trained on."""

from collections import deque


class Prefetcher:
    """Starts up to config.max_staleness iterations before they are trained on. No checkpoint holds what it has: a
    resumed run samples that again.

    problems: iteration -> this rank's problems of it
    """

    def __init__(self, sampler, policy, problems, config):
        self.sampler, self.policy = sampler, policy
        self.problems, self.config = problems, config
        self.waiting = deque()  # starts (iteration, again) in their order
        self.versions = {}      # {start: version of the weights that sample it}
        self.outputs = {}       # {start: what the sampler returned} of finished starts that were not asked for yet
        self.version = None     # of the weights that the sampler has

    def get(self, batch, iteration, again, last):
        """Rollouts of an iteration's problems, and {metric: (sum, count)}. The policy's weights have that version.

        batch: the problems; again: 0, or the number of the round of other problems for zero_std='resample'
        last: no iteration after this number will be trained
        """
        ahead = self.config.max_staleness
        if self.version != iteration:
            self.sampler.sync(self.policy.weights(), iteration)
            self.version = iteration
        key = iteration, again
        if key not in self.versions:
            self._start(key, batch)
        if again == 0:
            for later in range(iteration + 1, min(iteration + ahead, last) + 1):
                if (later, 0) not in self.versions:
                    self._start((later, 0), self.problems(later))
        while key not in self.outputs:  # a sampler finishes first what it started first
            self.outputs[self.waiting.popleft()] = self.sampler.finish()
        rollouts, sums = self.outputs.pop(key)
        staleness, P = iteration - self.versions.pop(key), rollouts.problems
        return rollouts, sums | {"staleness": (staleness * P, P)}

    def _start(self, key, batch):
        iteration, _ = key
        self.sampler.start(batch, iteration)
        self.waiting.append(key)
        self.versions[key] = self.version


class LocalSampler:
    """Samples as soon as it is asked to start: as far ahead as a sampler elsewhere, but not at the same time."""

    def __init__(self, policy, config):
        self.policy, self.config = policy, config
        self.rollouts = deque()

    def start(self, problems, iteration):
        self.rollouts.append(self.policy.sample(problems, iteration, self.config))

    def finish(self):
        return self.rollouts.popleft(), {}

    def sync(self, weights, version):
        """The policy has its weights already."""

    def close(self):
        self.rollouts.clear()
