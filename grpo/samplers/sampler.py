"""The interface of samplers, a sampler in this process, and sampling ahead of training.

make_prefetcher in grpo/build.py chooses the sampler. grpo/samplers/NAME.py implements sampler=NAME with two functions:

    check(config)               raises Mistake if its package or server is missing; starts nothing
    build(policy, config, dist) returns its Sampler
"""

from collections import deque
from typing import Protocol

from grpo.sampling_settings import SamplingSettings

# Seconds to wait for results from Ray or for a silent server: less than the 30-minute timeout of other ranks
LONGEST_CALL = 1500.0


class Sampler(Protocol):
    """Samples completions, in this process or elsewhere. Each rank has its own sampler for its share of the problems.

    The version of weights is the number of iterations they were trained for. The noise depends only on (config.seed,
    iteration, number of the problem, member of the group), so with the same weights all samplers that run the policy
    sample the same completions. A call that takes longer than LONGEST_CALL seconds raises Mistake.
    """

    def start(self, problems, iteration):
        """Starts sampling a batch of problems with the weights of the last sync. Several starts may be pending."""

    def finish(self):
        """Waits for the oldest unfinished start. Returns its Rollouts."""

    def sync(self, weights, version):
        """Loads the weights {name: tensor} for later starts. The caller may change the tensors after sync returns."""

    def close(self):
        """Releases all resources and drops unfinished starts."""


def with_ties(function, weights):
    """Returns {name: function(tensor)} of weights {name: tensor}. Tied weights share one result."""
    found = {}
    results = {}
    for name, x in weights.items():
        key = x.data_ptr(), x.shape
        if key not in found:  # not twice: each call copies the weight
            found[key] = function(x)
        results[name] = found[key]
    return results


class Prefetcher:
    """Keeps a sampler up to max_staleness iterations ahead of training. Checkpoints do not contain rollouts sampled
    ahead: a resumed run samples them again.

    problems: iteration -> the problems of this rank
    """

    def __init__(self, sampler, policy, problems, max_staleness):
        self.sampler = sampler
        self.policy = policy
        self.problems = problems
        self.max_staleness = max_staleness
        self.version = None     # of the sampler's weights
        self.next = 0           # the first iteration that is not started yet
        self.running = deque()  # (start, version of its weights), oldest first; a start is (iteration, again)
        self.finished = {}      # {start: (its Rollouts, version)}, not yet returned by `get`

    def get(self, batch, iteration, again, last):
        """Returns Rollouts of an iteration's problems, and {metric: (sum, count)}. `iteration` is also the version of
        the policy's weights.

        batch: the problems; again: 0, or the round of zero_std='resample' that replaces some of the problems
        last: the last iteration of the training
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
        # Samplers finish starts in order, so a later iteration may finish before a resampling round of this one
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
    """Simulates sampling ahead of training in this process, without a speedup: `start` samples immediately."""

    def __init__(self, policy, config):
        self.policy = policy
        self.settings = SamplingSettings.of(config)
        self.rollouts = deque()

    def start(self, problems, iteration):
        self.rollouts.append(self.policy.sample(problems, iteration, self.settings))

    def finish(self):
        return self.rollouts.popleft()

    def sync(self, weights, version):
        """Does nothing: the policy already has the weights."""

    def close(self):
        self.rollouts.clear()
