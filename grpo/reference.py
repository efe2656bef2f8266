"""The reference that the policy is kept near to, and how it moves: a table of modes."""

import torch


def static(reference, policy, iteration, config):
    """The generator at step 0, or reference_checkpoint, for good."""


@torch.no_grad()
def ema(reference, policy, iteration, config):
    """Follows the policy: reference = ema_alpha reference + (1 - ema_alpha) policy, after each iteration."""
    for old, new in zip(reference.parameters(), policy.parameters(), strict=True):  # a matrix that is tied comes once
        old.lerp_(new.to(old.device), 1 - config.ema_alpha)


@torch.no_grad()
def periodic(reference, policy, iteration, config):
    """Becomes the policy after every reference_update_freq iterations (as ref_model_sync_steps elsewhere)."""
    if iteration % config.reference_update_freq == 0:
        reference.load_weights(policy.weights())


REFERENCES = {"none": None, "static": static, "ema": ema, "periodic": periodic}


def needs_reference(config):
    """True if a run has a reference: with kl_beta=0 there is nothing to keep near it."""
    return REFERENCES[config.reference_mode] is not None and config.kl_beta > 0
