"""Where completions are written: the interface of samplers, and what the training step gets from one."""

from dataclasses import dataclass, field
from typing import Protocol

from grpo.rewards import Scored
from grpo.rollout import Rollouts


class SamplerError(ValueError):
    """A sampler did not do its part in time, or cannot do it. One line that names the setting or the address."""


@dataclass
class Finished:
    """The rollouts of a start, and who wrote them."""
    rollouts: Rollouts
    version: int                    # of the weights that wrote them; of the oldest, if several workers differ
    staleness: int = 0              # iterations that the policy was trained on since it had these weights
    scored: Scored | None = None    # their rewards, if the sampler computed them
    sums: dict = field(default_factory=dict)  # as those of grpo/step_metrics.py


class Sampler(Protocol):
    """Writes completions, in this process or elsewhere. Each rank has one for its share of the problems.

    The version of weights is the number of iterations that they were trained on. The noise depends on (config.seed,
    iteration, number of the problem, member of the group) alone: samplers that hold the policy write the same
    completions with the same weights. A call ends within config.sampler_timeout seconds, or raises SamplerError; with
    workers the time begins anew for one that replaces a lost one.
    `outside` is True if another process writes, whose log-probabilities can differ from the policy's.
    """
    outside: bool

    def start(self, problems, iteration, version):
        """Begins to write completions of a batch of problems with the weights of a version that `sync` has brought.
        May be called again before `finish`: first in, first out."""

    def finish(self):
        """Waits for the oldest start. Returns a Finished with its rollouts, their version and sums."""

    def sync(self, weights, version):
        """Takes over weights {name: tensor}, which may change as soon as this returns, for the starts that follow.
        Those before it are written with the weights of their own version."""

    def score(self, problems, written):
        """Begins to score known completions with the weights of the last sync. Returns a function without arguments
        that waits for the answers: a list with (N, M) log-probabilities at temperature 1, or None, from each worker.

        written: completions as policy.write returned them, on the CPU
        """

    def close(self):
        """Ends what the sampler has opened, also what is being written."""
