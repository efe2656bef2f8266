"""The interface of samplers, and sampling in this process or ahead of training.

grpo/build.py: make_prefetcher decides who samples. grpo/samplers/NAME.py is the module of sampler=NAME. It has two
functions:

    check(config)               raises Mistake if its package or its server is missing; starts nothing
    build(policy, config, dist) returns its Sampler
"""

from collections import deque
from typing import Protocol

from grpo.sampling_settings import SamplingSettings

LONGEST_CALL = 1500.0  # seconds: of a call of Ray, or of a silent server; other ranks give up after half an hour


class Sampler(Protocol):
    """Samples completions, in this process or elsewhere. Each rank has its own, for its share of the problems.

    The version of weights is the number of iterations that they were trained on. The noise depends only on
    (config.seed, iteration, number of the problem, member of the group): with the same weights all samplers that hold
    the policy sample the same completions. A call that takes longer than LONGEST_CALL seconds raises Mistake.
    """

    def start(self, problems, iteration):
        """Starts sampling a batch of problems with the weights of the last sync. May be called again before `finish`:
        first in, first out."""

    def finish(self):
        """Waits for the oldest start. Returns its Rollouts."""

    def sync(self, weights, version):
        """Takes the weights {name: tensor} for later starts. The caller may change them once this returns."""

    def close(self):
        """Closes what the sampler has opened, and drops unfinished starts."""


class Prefetcher:
    """Starts up to max_staleness iterations ahead of training. Checkpoints hold none of them: a resumed run samples
    them again.

    problems: iteration -> the problems of this rank
    """

    def __init__(self, sampler, policy, problems, max_staleness):
        self.sampler = sampler
        self.policy = policy
        self.problems = problems
        self.max_staleness = max_staleness
        self.version = None     # of the weights that the sampler has
        self.next = 0           # the first iteration that has not been started
        self.running = deque()  # (start, version of its weights), in order; a start is (iteration, again)
        self.finished = {}      # {start: (its Rollouts, version)} of starts that were not asked for yet

    def get(self, batch, iteration, again, last):
        """Rollouts of an iteration's problems, and {metric: (sum, count)}. The policy's weights have that version.

        batch: the problems; again: 0, or the round of zero_std='resample' that replaces some of them
        last: the last iteration that will be trained
        """
        if self.version != iteration:
            self.sampler.sync(self.policy.weights(), iteration)
            self.version = iteration
        if again > 0:
            self._start(batch, iteration, again)
        else:
            end = 1 + min(iteration + self.max_staleness, last)
            for each in range(max(iteration, self.next), end):
                self._start(self.problems(each), each, 0)
            self.next = end
        # Samplers finish in the order of the starts, so a later iteration may come before a round of this one
        while (iteration, again) not in self.finished:
            start, version = self.running.popleft()
            self.finished[start] = self.sampler.finish(), version
        rollouts, version = self.finished.pop((iteration, again))
        P = rollouts.problems
        return rollouts, {"staleness": ((iteration - version) * P, P)}

    def _start(self, problems, iteration, again):
        self.sampler.start(problems, iteration)
        self.running.append(((iteration, again), self.version))


class LocalSampler:
    """Simulates asynchronous sampling in this process, without a speedup: each start is sampled at once."""

    def __init__(self, policy, config):
        self.policy = policy
        self.settings = SamplingSettings.of(config)
        self.rollouts = deque()

    def start(self, problems, iteration):
        self.rollouts.append(self.policy.sample(problems, iteration, self.settings))

    def finish(self):
        return self.rollouts.popleft()

    def sync(self, weights, version):
        """The policy has its weights already."""

    def close(self):
        self.rollouts.clear()
