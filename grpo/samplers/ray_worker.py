"""What runs in a worker process of Ray: a policy that samples completions, and rewards if they are computed there."""

from dataclasses import replace

import torch

from grpo.rollout import moved
from grpo.samplers.packed_weights import unpack
from grpo.scoring import score_in_batches


class RayWorker:
    """Calls run one after another, in their order. Each brings the weights that it needs, so that a new worker in the
    place of a lost one knows as much."""

    def build(self, make, config):
        """make: config -> (policy, a Rewards or None). Returns True."""
        self.config, self.version = config, None
        self.policy, self.rewards = make(config)
        return True

    def write(self, problems, iteration, version, packed):
        """Returns what policy.write returns, on the CPU; the version of the weights; and a Scored or None."""
        self.load(version, packed)
        written = self.policy.write(problems, iteration, self.config)
        scored = None
        if self.rewards is not None:
            if hasattr(self.rewards, "state"):
                self.rewards.state.global_step = iteration * self.config.ppo_epochs * self.config.minibatches
            scored = on_cpu(self.rewards(self.policy.rollouts(problems, written, self.config)))
        return moved(written, "cpu"), self.version, scored

    @torch.no_grad()
    def score(self, problems, written, version, packed):
        """(N, M) log-probabilities of completions at temperature 1, on the CPU."""
        self.load(version, packed)
        rollouts = self.policy.rollouts(problems, moved(written, self.policy.device), self.config)
        return score_in_batches(self.policy, rollouts, replace(self.config, temperature=1.0)).cpu()

    def load(self, version, packed):
        """Takes over weights as `pack` gave them, unless it has this version."""
        if version != self.version:
            self.version = None  # an interrupted copy is of no version
            self.policy.load_weights(unpack(packed))
            self.version = version


def on_cpu(scored):
    """A Scored with its tensors on the CPU."""
    scored = moved(scored, "cpu")
    scored.values = {name: x.cpu() for name, x in scored.values.items()}
    return scored
