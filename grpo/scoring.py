"""Log-probabilities, entropy and exact KL of the sampled tokens of rollouts, in bounded memory."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from core.distributions import LOGITS_AT_ONCE, entropy, in_parts, restrict, sampling_logp
from grpo.kl import exact_kl
from grpo.rollout import places_of


@dataclass
class Scores:
    """Scores of N completions of M tokens under one policy; 0 where no state predicts the token."""
    logp: torch.Tensor              # (N, M) of each sampled token, under the distribution that it is drawn from
    entropy: torch.Tensor           # (N, M) of the whole distribution; with a gradient only if learn_entropy
    kl: torch.Tensor | None = None  # (N, M) exact KL to the reference, if rollouts.ref_distributions is known


def score(policy, rollouts, temperature, learn_entropy=False):
    """Reads the rollouts and scores their tokens. Logits are made for sampled tokens only, and in parts if they are
    many."""
    h = policy.states(rollouts.reading)                                              # (K, C)
    index = rollouts.reading.index().to(h.device, non_blocking=True)                 # (K, g)
    target = rollouts.target.flatten()[index]                                        # (K, g)

    def token_scores(h, target, kept, ref_distributions):
        full = sampling_logp(policy.project(h), temperature)                         # (K, V)
        drawn = restrict(full, kept)                                                 # (K, V)
        kl = []
        if ref_distributions is not None:
            kl = [exact_kl(full, ref_distributions)]                                 # (K,)
        read = full if learn_entropy else full.detach()
        return drawn.gather(-1, target), entropy(read), *kl

    parts = in_parts(token_scores, policy.vocabulary, h, target, rollouts.reading.kept, rollouts.ref_distributions)

    def by_completion(x):                                                            # (K, g) or (K,) -> (N, M)
        if x.dim() == 1:
            x = x[:, None].expand(index.shape)
        out = x.new_zeros(rollouts.target.numel()).index_copy(0, index.flatten(), x.flatten())
        return out.view_as(rollouts.target)

    return Scores(*(by_completion(x) for x in parts))


@contextmanager
def visiting(policy, device):
    """Within, the policy is on the device; one that waits elsewhere (ref_offload) goes back afterwards."""
    home = policy.device
    if home != device:
        policy.to(device)
    try:
        yield
    finally:
        if home != device:
            policy.to(home)


@torch.no_grad()
def with_reference(rollouts, reference, estimator, config):
    """The rollouts with what the reference says about their tokens, read once, a micro-batch at a time.

    estimator: "exact" stores its distributions at every state, k2 and k3 the log-probabilities of the sampled tokens
    """
    if reference is None:
        return rollouts
    with visiting(reference, rollouts.target.device):
        if estimator == "exact":
            return replace(rollouts, ref_distributions=distributions(reference, rollouts.reading, config))
        return replace(rollouts, ref_logp=score_in_batches(reference, rollouts, config))


def distributions(reference, reading, config):
    """(K, V) untruncated log-probabilities. Written in place part by part: besides them exist only the logits of one
    part."""
    counts = reading.counts()
    full = torch.empty(int(counts.sum()), reference.vocabulary, device=reference.device)
    size = max(1, LOGITS_AT_ONCE // reference.vocabulary)
    for part in reading.micro_batches(config):
        h = reference.states(reading.select(part)).split(size)
        places = places_of(part, counts).to(full.device).split(size)
        for states, place in zip(h, places, strict=True):
            full[place] = sampling_logp(reference.project(states), config.temperature).float()
    return full


@torch.no_grad()
def score_in_batches(policy, rollouts, config):
    """Log-probabilities (N, M) of the sampled tokens, a micro-batch at a time."""
    if not rollouts.problems:
        return rollouts.old_logp
    logp, order = [], []
    for part in rollouts.reading.micro_batches(config):
        micro, rows = rollouts.select(part)
        logp.append(score(policy, micro, config.temperature).logp)
        order.append(rows)
    return torch.cat(logp)[torch.cat(order).argsort()]
