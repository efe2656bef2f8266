"""The interface of samplers, and sampling in this process or ahead of training.

grpo/build.py: make_prefetcher decides who samples. grpo/samplers/NAME.py is the module of sampler=NAME. It has two
functions:

    check(config)               raises Mistake if its package or its server is missing; starts nothing
    build(policy, config, dist) returns its Sampler
"""

from collections import deque
from typing import Protocol

from grpo.sampling_settings import SamplingSettings

# Seconds to wait for an answer of Ray, or for a silent server: less than the half hour after which other ranks give up
LONGEST_CALL = 1500.0


class Sampler(Protocol):
    """Samples completions, in this process or elsewhere. Each rank has its own, for its share of the problems.

    The version of weights is the number of iterations that they were trained on. The noise depends only on
    (config.seed, iteration, number of the problem, member of the group): with the same weights all samplers that run
    the policy itself sample the same completions. A call that takes longer than LONGEST_CALL seconds raises Mistake.
    """

    def start(self, problems, iteration):
        """Starts sampling a batch of problems with the weights of the last sync. Several starts may be unfinished."""

    def finish(self):
        """Waits for the oldest unfinished start. Returns its Rollouts."""

    def sync(self, weights, version):
        """Takes the weights {name: tensor} for later starts. The caller may change them once this returns."""

    def close(self):
        """Closes what the sampler has opened, and drops unfinished starts."""


class Prefetcher:
    """Keeps a sampler up to max_staleness iterations ahead of training. Checkpoints do not hold what was sampled ahead:
    a resumed run samples it again.

    problems: iteration -> the problems of this rank
    """

    def __init__(self, sampler, policy, problems, max_staleness):
        self.sampler = sampler
        self.policy = policy
        self.problems = problems
        self.max_staleness = max_staleness
        self.version = None     # of the weights that the sampler has
        self.next = 0           # the first iteration that was not started
        self.running = deque()  # (start, version of its weights) in order, where a start is (iteration, again)
        self.finished = {}      # {start: (its Rollouts, version)} of starts that `get` has not returned yet

    def get(self, batch, iteration, again, last):
        """Rollouts of an iteration's problems, and {metric: (sum, count)}. The policy was trained on that many
        iterations, so `iteration` is also the version of its weights.

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
                problems = self.problems(each)
                self._start(problems, each, 0)
            self.next = end
        # Samplers finish in the order of the starts, so a later iteration may come before a round of this one
        while (iteration, again) not in self.finished:
            start, version = self.running.popleft()
            self.finished[start] = self.sampler.finish(), version
        rollouts, version = self.finished.pop((iteration, again))
        P = rollouts.problems
        staleness = iteration - version
        return rollouts, {"staleness": (staleness * P, P)}

    def _start(self, problems, iteration, again):
        self.sampler.start(problems, iteration)
        start = iteration, again
        self.running.append((start, self.version))


class LocalSampler:
    """Simulates sampling ahead of training in this process, without a speedup: each start is sampled at once."""

    def __init__(self, policy, config):
        self.policy = policy
        self.settings = SamplingSettings.of(config)
        self.rollouts = deque()

    def start(self, problems, iteration):
        self.rollouts.append(self.policy.sample(problems, iteration, self.settings))

    def finish(self):
        return self.rollouts.popleft()

    def sync(self, weights, version):
        """Does nothing: the policy has its weights already."""

    def close(self):
        self.rollouts.clear()
