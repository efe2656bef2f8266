"""The interface of samplers: where completions are sampled, and what a sampler returns."""

from typing import Protocol


class SamplerError(ValueError):
    """A sampler did not do its part in time, or cannot do it. One line that names the setting or the address."""


class Sampler(Protocol):
    """Samples completions, in this process or elsewhere. Each rank has one for its share of the problems.

    The version of weights is the number of iterations that they were trained on. The noise depends on (config.seed,
    iteration, number of the problem, member of the group) alone: samplers that hold the policy sample the same
    completions with the same weights. A call that waits for config.sampler_timeout seconds in vain raises SamplerError.
    """

    def start(self, problems, iteration):
        """Begins to sample completions of a batch of problems with the weights of the last sync. May be called again
        before `finish`: first in, first out."""

    def finish(self):
        """Waits for the oldest start. Returns its Rollouts, and {metric: (sum, count)} as in grpo/step_metrics.py."""

    def sync(self, weights, version):
        """Takes over weights {name: tensor}, which may change as soon as this returns, for the starts that follow."""

    def close(self):
        """Ends whatever the sampler has opened, and starts that were not finished."""
