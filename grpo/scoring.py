"""What a model says about the tokens of rollouts: log-probabilities, entropy and exact KL, in bounded memory."""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import checkpoint

from core.losses import entropy, exact_kl, restrict, sampling_logp

LOGITS_AT_ONCE = 2**25  # numbers; above it logits are made in parts, and made again for the backward pass
EXACT_VOCABULARY = 4096  # the largest whose distributions are kept at every chosen token


@dataclass
class Scores:
    """What a model says about N completions of M tokens; 0 on padding."""
    logp: torch.Tensor       # (N, M) of the chosen token, under the distribution that is drawn from
    entropy: torch.Tensor    # (N, M) of the whole distribution; with gradient only if learn_entropy
    kl: torch.Tensor | None  # (N, M) exact KL to the reference, if rollouts.ref_full is known


def chosen_states(model, rollouts):
    """The states (K, C) that speak about chosen tokens, and which of the R * M places they are; None for all."""
    h = rollouts.read(model).flatten(0, 1)                                           # (R * M, C)
    if rollouts.length is None:
        return h, None
    chosen = torch.arange(rollouts.position.shape[1]) < rollouts.length[:, None]     # (R, M) on the CPU: no device sync
    where = chosen.flatten().nonzero().squeeze(1).to(h.device)
    return h[where], where


def score(model, rollouts, temperature, learn_entropy=False):
    """Reads the rollouts' inputs and scores their tokens. Logits exist at chosen positions only, and not all at once if
    they are many."""
    R, M = rollouts.position.shape
    g = len(rollouts.target) // R                                                    # completions that share an input
    h, where = chosen_states(model, rollouts)
    target = rollouts.target.view(R, g, M).transpose(1, 2).reshape(R * M, g)
    kept, ref_full = (None if x is None else x.flatten(0, 1) for x in (rollouts.kept, rollouts.ref_full))
    if where is not None:
        target, kept, ref_full = (None if x is None else x[where] for x in (target, kept, ref_full))

    def speak(h, target, kept, ref_full):
        full = sampling_logp(model.project(h), temperature)                          # (K, V)
        drawn = restrict(full, kept)
        kl = full.new_zeros(0) if ref_full is None else exact_kl(full, ref_full)
        spread = entropy(full if learn_entropy else full.detach())
        return drawn.gather(-1, target), spread, kl                                  # (K, g), (K,), (K,)

    size = max(1, LOGITS_AT_ONCE // model.config.base_vocab_size)
    if len(h) <= size:
        logp, ent, kl = speak(h, target, kept, ref_full)
    else:
        split = lambda x: [None] * -(-len(h) // size) if x is None else x.split(size)
        parts = zip(*map(split, (h, target, kept, ref_full)), strict=True)
        logp, ent, kl = map(torch.cat, zip(*(checkpoint(speak, *part, use_reentrant=False) for part in parts)))

    def by_completion(x):                                                            # (K, ...) -> (N, M)
        x = x if x.dim() == 2 else x[:, None].expand(-1, g)
        if where is not None:
            x = x.new_zeros(R * M, g).index_copy(0, where, x)
        return x.view(R, M, g).transpose(1, 2).reshape(R * g, M)

    return Scores(by_completion(logp), by_completion(ent), by_completion(kl) if ref_full is not None else None)


def check_exact(config, model):
    """Raises ValueError if the exact KL would have to store the distributions of a large vocabulary."""
    if config.kl_estimator == "exact" and model.config.base_vocab_size > EXACT_VOCABULARY:
        raise ValueError(f"kl_estimator='exact' keeps {model.config.base_vocab_size} numbers for every token; "
                         f"above a vocabulary of {EXACT_VOCABULARY} use kl_estimator='k3'")


@contextmanager
def visiting(model, device):
    """Within, the model is on the device; a model that waits elsewhere (ref_offload) goes back afterwards."""
    home = next((p.device for p in model.parameters()), device)
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


@torch.no_grad()
def with_reference(rollouts, reference, temperature, micro_batch, autocast):
    """The rollouts with what the reference says about their tokens, read once; micro_batch: problems per forward."""
    if reference is None or not rollouts.problems:
        return rollouts
    with visiting(reference, rollouts.target.device):
        return _with_reference(rollouts, reference, temperature, micro_batch, autocast)


def _with_reference(rollouts, reference, temperature, micro_batch, autocast):
    exact = rollouts.kl_estimator == "exact"
    full, logp = [], []
    for part in torch.arange(rollouts.problems).split(micro_batch):
        some, _ = rollouts.select(part)
        with autocast:
            if exact:
                h, where = chosen_states(reference, some)
                p = sampling_logp(reference.project(h), temperature)                 # (K, V)
                p = p if where is None else p.new_zeros(some.position.numel(), p.shape[1]).index_copy(0, where, p)
                full.append(p.view(*some.position.shape, -1))                        # (r, M, V)
            else:
                logp.append(score(reference, some, temperature).logp)
    return replace(rollouts, ref_full=torch.cat(full) if full else None, ref_logp=torch.cat(logp) if logp else None)


@torch.no_grad()
def with_old_policy(rollouts, policy, temperature, micro_batch, autocast):
    """The rollouts with old_logp as the scorer has it, so that the first ratio is exactly 1 also where the sampler
    reads through a cache or in bfloat16. For rollouts that serve several steps."""
    if not rollouts.problems:
        return rollouts
    logp = []
    for part in torch.arange(rollouts.problems).split(micro_batch):
        with autocast:
            logp.append(score(policy, rollouts.select(part)[0], temperature).logp)
    return replace(rollouts, old_logp=torch.cat(logp))
