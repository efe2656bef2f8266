"""Rollouts in time: which iterations are being written while another is trained, and how old they may be."""

from collections import deque
from dataclasses import replace

from grpo.samplers.sampler import SamplerError

MOST_DROPS = 3  # of one batch of problems in a row: then the sampler does not follow the policy at all


class Ahead:
    """Lets a sampler write the iterations of a run, up to config.max_staleness of them before they are trained on.

    problems: iteration -> this rank's problems of it
    canary: checks that a sync arrived, before rollouts are handed out (grpo/samplers/canary.py); None: nothing does
    Nothing of it is in a checkpoint: what is being written when a run ends is written anew, with the weights of the
    checkpoint, when it is resumed.
    """

    def __init__(self, sampler, policy, problems, config, canary=None):
        self.sampler, self.policy, self.problems, self.config, self.canary = sampler, policy, problems, config, canary
        self.waiting, self.done, self.version = deque(), {}, None  # names of starts, {name: Finished}

    def take(self, batch, iteration, again, last):
        """The Finished of problems of an iteration. The version of the weights at hand is the iteration.

        batch: the problems; again: 0, or the number of the round of other problems for zero_std='resample'
        last: no iteration after this number will be trained
        """
        if self.version != iteration:
            self.sampler.sync(self.policy.weights(), iteration)
            self.version = iteration
            if self.canary is not None:
                self.canary.begin(iteration)
        name, dropped = (iteration, again), 0
        self._start(name, batch)
        if not again:
            for ahead in range(iteration + 1, min(iteration + self.config.max_staleness, last) + 1):
                self._start((ahead, 0), None)
        while True:
            finished = self._finish(name)
            staleness = iteration - finished.version
            if staleness <= self.config.max_staleness:
                break
            dropped += 1
            if dropped == MOST_DROPS:
                raise SamplerError(
                    f"max_staleness={self.config.max_staleness}: the sampler wrote iteration {iteration} {MOST_DROPS} "
                    f"times with weights of iteration {finished.version}; it does not take over new weights")
            self._start(name, batch)
        if self.canary is not None:
            self.canary.check()
        sums = finished.sums
        if self.sampler.outside or self.config.max_staleness:
            P = finished.rollouts.problems
            sums = sums | {"dropped_rollouts": dropped, "sum of staleness": staleness * P, "count of staleness": P}
        return replace(finished, staleness=staleness, sums=sums)

    def _start(self, name, batch):
        if name not in self.waiting and name not in self.done:
            iteration, _ = name
            self.sampler.start(self.problems(iteration) if batch is None else batch, iteration, self.version)
            self.waiting.append(name)

    def _finish(self, name):
        """What was started under a name. What is finished before it is kept until it is asked for."""
        while name not in self.done:
            self.done[self.waiting.popleft()] = self.sampler.finish()
        return self.done.pop(name)
