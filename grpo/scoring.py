"""Log-probabilities, entropy and exact KL of the sampled tokens of rollouts, in bounded memory."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from core.distributions import LOGITS_AT_ONCE, entropy, in_parts, restrict, sampling_logp
from core.performance.kept_tokens import KeptTokens
from grpo.kl import exact_kl
from grpo.rollout import places_of


@dataclass
class Scores:
    """Of N completions of M tokens under one policy; 0 where no state predicts the token."""
    logp: torch.Tensor       # (N, M) of each sampled token, under the distribution that it is drawn from
    entropy: torch.Tensor    # (N, M) of the whole distribution; with a gradient only if learn_entropy
    kl: torch.Tensor | None  # (N, M) exact KL to the reference, if rollouts.ref_distributions is known


def score(policy, rollouts, temperature, learn_entropy=False):
    """Reads the rollouts and scores their tokens. Logits are made for sampled tokens only, and in parts if they are
    many."""
    h, index = policy.states(rollouts.reading), rollouts.reading.index()             # (K, C), (K, g)
    index = index.to(h.device, non_blocking=True)
    target = rollouts.target.flatten()[index]                                        # (K, g)

    def token_scores(h, target, kept, ref_distributions):
        full = sampling_logp(policy.project(h), temperature)                         # (K, V)
        drawn = restrict(full, kept)
        kl = full.new_zeros(len(full)) if ref_distributions is None else exact_kl(full, ref_distributions)
        return drawn.gather(-1, target), entropy(full if learn_entropy else full.detach()), kl  # (K, g), (K,), (K,)

    parts = in_parts(token_scores, policy.vocabulary, h, target, rollouts.reading.kept, rollouts.ref_distributions)

    def by_completion(x):                                                            # (K, g) or (K,) -> (N, M)
        x = x if x.dim() == 2 else x[:, None].expand(index.shape)
        out = x.new_zeros(rollouts.target.numel()).index_copy(0, index.flatten(), x.flatten())
        return out.view_as(rollouts.target)

    logp, ent, kl = map(by_completion, parts)
    return Scores(logp, ent, None if rollouts.ref_distributions is None else kl)


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


def check_stored(states, vocabulary, config, exact, truncated, kept=None):
    """Raises ValueError if what rollouts store for K states is certain not to fit into stored_megabytes.

    states: K; exact: whether distributions are stored for the exact KL, 4 bytes for each token of the vocabulary;
    truncated: whether the tokens that truncation kept are; kept: their KeptTokens, or None before they are sampled,
    where at least one token counts for each state
    """
    stored, uses, ways = 0, [], []
    if exact:
        stored += 4 * states * vocabulary
        uses.append(f"{vocabulary} numbers each for the exact KL")
        ways.append("kl_estimator='k3'")
    if truncated:
        stored += KeptTokens.LEAST_BYTES * states if kept is None else kept.bytes
        uses.append("the tokens that truncation kept")
        ways.append("top_p=1.0, top_k=0 and min_p=0.0")
    megabytes = stored / 2**20
    if megabytes > config.stored_megabytes:
        raise ValueError(f"stored_megabytes={config.stored_megabytes} is not enough: for up to {states} tokens, "
                         f"{' and '.join(uses)} take {megabytes:.0f} MB; set {' and '.join(ways)}, lower batch_size, "
                         "group_size or the length, or raise stored_megabytes")


def check_rollouts(rollouts, config):
    """Raises ValueError if what joined rollouts store does not fit into stored_megabytes: each part may have fitted."""
    kept, exact = rollouts.reading.kept, rollouts.ref_distributions is not None
    states = int(rollouts.reading.counts().sum())
    vocabulary = rollouts.ref_distributions.shape[1] if exact else 0
    check_stored(states, vocabulary, config, exact, kept is not None, kept)


@torch.no_grad()
def with_reference(rollouts, reference, estimator, config):
    """The rollouts with what the reference says about their tokens, read once, a micro-batch at a time.

    estimator: "exact" stores its distributions at every state, k2 and k3 the log-probabilities of the sampled tokens
    """
    if reference is None or not rollouts.problems:
        return rollouts
    read = reference_distributions if estimator == "exact" else reference_logp
    with visiting(reference, rollouts.target.device):
        return read(rollouts, reference, config)


def reference_logp(rollouts, reference, config):
    return replace(rollouts, ref_logp=score_in_batches(reference, rollouts, config))


def reference_distributions(rollouts, reference, config):
    """Written in place part by part: beside them exist only the logits of one part."""
    counts, full, kept = rollouts.reading.counts(), None, rollouts.reading.kept
    check_stored(int(counts.sum()), reference.vocabulary, config, True, kept is not None, kept)
    size = max(1, LOGITS_AT_ONCE // reference.vocabulary)
    for part in rollouts.reading.micro_batches(config):
        places = places_of(part, counts)                                             # those of its states among all K
        for h, place in zip(reference.states(rollouts.reading.select(part)).split(size), places.split(size),
                            strict=True):
            logp = sampling_logp(reference.project(h), config.temperature)           # (k, V)
            full = logp.new_empty(int(counts.sum()), logp.shape[1]) if full is None else full
            full[place.to(full.device)] = logp
    return replace(rollouts, ref_distributions=full)


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
