"""Sampling ahead of training: a sampler starts later iterations while an earlier one is trained on."""

from collections import deque
from dataclasses import replace

from grpo.samplers.sampler import SamplerError

MOST_RETRIES = 3  # times in a row that one batch is too stale: then the sampler does not take over weights at all


class Prefetcher:
    """Starts up to config.max_staleness iterations before they are trained on, and refuses rollouts that are staler.

    problems: iteration -> this rank's problems of it
    sync_check: confirms that new weights arrived (grpo/samplers/sync_check.py); None: nothing is checked
    A checkpoint holds nothing of it: what is being sampled when a run ends is sampled again when the run is resumed,
    with the weights of the checkpoint.
    """

    def __init__(self, sampler, policy, problems, config, sync_check=None):
        self.sampler, self.policy, self.problems, self.config = sampler, policy, problems, config
        self.sync_check = sync_check
        self.waiting = deque()  # starts (iteration, again) in their order
        self.outputs = {}       # {start: SamplerOutput} of finished starts that were not asked for yet
        self.version = None     # of the weights that the sampler has

    def get(self, batch, iteration, again, last):
        """The SamplerOutput of an iteration's problems. The policy's weights have the iteration as their version.

        batch: the problems; again: 0, or the number of the round of other problems for zero_std='resample'
        last: no iteration after this number will be trained
        """
        if self.version != iteration:
            self._sync(iteration)
        key = iteration, again
        self._start(key, batch)
        if again == 0:
            for later in range(iteration + 1, min(iteration + self.config.max_staleness, last) + 1):
                self._start((later, 0), None)
        output, dropped = self._finish_fresh(key, batch)
        if self.sync_check is not None:
            self.sync_check.check()
        if not self.sampler.outside and not self.config.max_staleness:
            return output
        P = output.rollouts.problems
        staleness = iteration - output.version
        return replace(output, sums=output.sums | {
            "dropped_rollouts": dropped, "sum of staleness": staleness * P, "count of staleness": P})

    def _sync(self, version):
        self.sampler.sync(self.policy.weights(), version)
        self.version = version
        if self.sync_check is not None:
            self.sync_check.begin(version)

    def _start(self, key, batch):
        if key not in self.waiting and key not in self.outputs:
            iteration, _ = key
            problems = self.problems(iteration) if batch is None else batch
            self.sampler.start(problems, iteration, self.version)
            self.waiting.append(key)

    def _finish_fresh(self, key, batch):
        """The output of a start, and how many outputs were dropped before because their weights were too old."""
        iteration, _ = key
        for dropped in range(MOST_RETRIES):
            output = self._finish(key)
            if iteration - output.version <= self.config.max_staleness:
                return output, dropped
            if dropped < MOST_RETRIES - 1:
                self._start(key, batch)
        raise SamplerError(
            f"max_staleness={self.config.max_staleness}: the sampler sampled iteration {iteration} {MOST_RETRIES} "
            f"times with weights of iteration {output.version}; it does not take over new weights")

    def _finish(self, key):
        """The output of a start. Outputs that are finished before it are kept until they are asked for."""
        while key not in self.outputs:
            self.outputs[self.waiting.popleft()] = self.sampler.finish()
        return self.outputs.pop(key)
