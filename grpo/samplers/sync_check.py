"""A check that new weights arrived in a sampler: after every sync the policy and the sampler score the same known
tokens. Weights that did not arrive, or not all of them, end the run instead of spoiling it."""

import math
from dataclasses import replace

import torch

from grpo.environments import without_environment
from grpo.samplers.sampler import SamplerError
from grpo.scoring import score_in_batches

KNOWN = 16        # completions of the run's first prompts, at least one group
TOLERANCE = 0.1   # nats: mean difference of a token's log-probability that no precision explains
ROUNDING = 1e-5   # nats: mean differences below this say nothing


class SyncCheck:
    """Scores the same few completions, which the policy writes itself at the start, with both sides at temperature 1.

    A sync has failed if the sampler's scores differ from those of the policy by more than TOLERANCE on average, or are
    less than half as far from those of the version before: another engine or precision moves them in any direction,
    but not back to the earlier weights. As long as training has moved the scores by less than the engines differ,
    nothing can be told, and the version before stays the one to compare with.
    """

    def __init__(self, sampler, policy, problems, config):
        """problems: those of the run's first iteration; config: of the run"""
        few = max(1, KNOWN // config.group_size)
        self.problems = {key: x[:few] for key, x in problems.items()}
        # A server that is asked for the scores of a text writes one more token, for which there must be room
        shorter = {"max_new_tokens": max(1, config.max_new_tokens - 1), "overlong_buffer": 0}
        self.sampler, self.policy = sampler, policy
        self.config = replace(without_environment(config), temperature=1.0, **shorter)
        self.rollouts, self.answers = None, None
        self.now, self.earlier = None, None  # (version, its scores (N, M)), by the policy

    @torch.no_grad()
    def begin(self, version):
        """Lets both score, after a sync of this version; the policy at once, the sampler when it comes to it."""
        if self.rollouts is None:
            self.rollouts = replace(self.policy.sample(self.problems, 0, self.config), texts=None)
            self.mask = self.rollouts.mask.cpu() > 0                                 # (N, M)
        self.now = version, score_in_batches(self.policy, self.rollouts, self.config).cpu()
        self.answers = self.sampler.score(self.problems, self.rollouts)

    def check(self):
        """Waits for the sampler's scores of the last sync. Raises SamplerError if it did not arrive."""
        if self.answers is None:
            return
        answers, self.answers = self.answers(), None
        arrived = [self._arrived(theirs) for theirs in answers]
        if all(arrived):
            self.earlier = self.now

    def _away(self, theirs, known):
        """The mean difference of scores (N, M) from those of a version."""
        return float((theirs.cpu() - known[1])[self.mask].abs().mean())

    def _arrived(self, theirs):
        """True if scores (N, M) are surely of the version now. Raises SamplerError if they are surely not."""
        version, _ = self.now
        of_now, of_earlier = self._away(theirs, self.now), math.inf
        if self.earlier is not None:
            of_earlier = self._away(theirs, self.earlier)
        if of_now > max(2 * of_earlier, ROUNDING):
            raise SamplerError(
                f"sampler={self.config.sampler!r}: the weights of iteration {version} did not arrive: known tokens get "
                f"the log-probabilities of iteration {self.earlier[0]} (mean difference {of_earlier:.2g} nats, "
                f"{of_now:.2g} to those of iteration {version}); look at the sampler's own log")
        if not of_now <= TOLERANCE:  # also where it is not a number
            raise SamplerError(
                f"sampler={self.config.sampler!r}: after the sync of iteration {version} known tokens get "
                f"log-probabilities that differ from the policy's by {of_now:.2g} nats on average, more than "
                f"{TOLERANCE:g}: it holds other weights, another model, or rounds far more")
        return of_earlier > max(2 * of_now, ROUNDING)
