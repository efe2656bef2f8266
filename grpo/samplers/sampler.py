"""Samplers: their interface, and sampling in this process, ahead of training or not.

grpo/build.py: make_sampler decides who samples. grpo/samplers/NAME.py is the module of sampler=NAME. It has two
functions:

    check(config)               raises Mistake if its package or its server is missing; starts nothing
    build(policy, config, dist) returns its Sampler
"""

from collections import deque
from typing import Protocol

from grpo.sampling_settings import SamplingSettings

LONGEST_CALL = 1500.0  # seconds that a call of Ray may take, or a server be silent: other ranks wait for half an hour


class Sampler(Protocol):
    """Samples completions, in this process or elsewhere. Each rank has its own, for its share of the problems.

    The version of weights is the number of iterations that they were trained on. The noise depends on (config.seed,
    iteration, number of the problem, member of the group) alone: samplers that hold the policy sample the same
    completions with the same weights. A call that takes longer than LONGEST_CALL seconds raises Mistake.
    """

    def start(self, problems, iteration):
        """Starts sampling a batch of problems with the weights of the last sync. May be called again before `finish`:
        first in, first out."""

    def finish(self):
        """Waits for the oldest start. Returns its Rollouts."""

    def sync(self, weights, version):
        """Takes the weights {name: tensor} of later starts. The caller may change them once this returns."""

    def close(self):
        """Ends what the sampler has opened, and drops unfinished starts."""


class Prefetcher:
    """Starts up to config.max_staleness iterations ahead of training. Checkpoints hold none of them: a resumed run
    samples them again.

    problems: iteration -> the problems of this rank
    """

    def __init__(self, sampler, policy, problems, config):
        self.sampler, self.policy = sampler, policy
        self.problems, self.config = problems, config
        self.versions = {}   # {start: version of its weights}, in the order of the starts; a start: (iteration, again)
        self.outputs = {}    # {start: its Rollouts} of starts that nobody has asked for yet
        self.version = None  # of the weights that the sampler has

    def get(self, batch, iteration, again, last):
        """Rollouts of an iteration's problems, and {metric: (sum, count)}. The policy's weights have that version.

        batch: the problems; again: 0, or the round of zero_std='resample' that replaces some of them
        last: the last iteration that will be trained
        """
        if self.version != iteration:
            self.sampler.sync(self.policy.weights(), iteration)
            self.version = iteration
        key = iteration, again
        if key not in self.versions:
            self._start(key, batch)
        if again == 0:
            for later in range(iteration + 1, min(iteration + self.config.max_staleness, last) + 1):
                if (later, 0) not in self.versions:
                    self._start((later, 0), self.problems(later))
        while key not in self.outputs:
            oldest = next(start for start in self.versions if start not in self.outputs)
            self.outputs[oldest] = self.sampler.finish()
        rollouts = self.outputs.pop(key)
        staleness, P = iteration - self.versions.pop(key), rollouts.problems
        return rollouts, {"staleness": (staleness * P, P)}

    def close(self):
        self.sampler.close()

    def _start(self, key, batch):
        self.sampler.start(batch, key[0])
        self.versions[key] = self.version


class LocalSampler:
    """Simulates asynchronous sampling in this process, without a speedup: each start is sampled at once."""

    def __init__(self, policy, config):
        self.policy, self.settings = policy, SamplingSettings.of(config)
        self.rollouts = deque()

    def start(self, problems, iteration):
        self.rollouts.append(self.policy.sample(problems, iteration, self.settings))

    def finish(self):
        return self.rollouts.popleft()

    def sync(self, weights, version):
        """The policy has its weights already."""

    def close(self):
        self.rollouts.clear()
