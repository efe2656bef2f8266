"""What the policy is kept near, and how that moves: a table of modes, and a penalty that adapts."""

import copy

import torch

from core.checkpoint_manager import freeze, load_model
from core.model import bare

ADAPT_RATE, ADAPT_RANGE = 0.1, 100.0  # kl_beta moves by at most a fifth of the rate at once, within this factor


def static(reference, policy, iteration, config):
    """The generator at step 0, or reference_checkpoint, for good."""


@torch.no_grad()
def ema(reference, policy, iteration, config):
    """Follows the policy: reference = ema_alpha reference + (1 - ema_alpha) policy, after each iteration."""
    for old, new in zip(reference.parameters(), bare(policy).parameters(), strict=True):
        old.lerp_(new.to(old.device), 1 - config.ema_alpha)


@torch.no_grad()
def periodic(reference, policy, iteration, config):
    """Becomes the policy after every reference_update_freq iterations (as ref_model_sync_steps elsewhere)."""
    if iteration % config.reference_update_freq == 0:
        for old, new in zip(reference.parameters(), bare(policy).parameters(), strict=True):
            old.copy_(new)


REFERENCES = {"none": None, "static": static, "ema": ema, "periodic": periodic}


def build_reference(policy, config, tokenizer, device):
    """A frozen copy of the policy at step 0, or reference_checkpoint; None if nothing is to be kept near it."""
    if REFERENCES[config.reference_mode] is None or config.kl_beta == 0:
        return None
    if config.reference_checkpoint is not None:
        path = config.reference_checkpoint
        reference = load_model(path, device, policy.config.mode, tokenizer, "reference_checkpoint")[0]
        if config.reference_mode != "static" and reference.config != policy.config:
            raise ValueError(f"reference_checkpoint={path} has another shape than the generator, so "
                             f"reference_mode={config.reference_mode!r} cannot move it to the policy; use 'static'")
    else:
        reference = copy.deepcopy(policy)
    reference = freeze(reference)
    return reference.to("cpu") if config.ref_offload else reference


def adapted(kl_beta, mean_kl, config):
    """kl_beta after a step, a proportional controller (arXiv 1909.08593 section 2.2) that is clamped: too far from the
    reference raises it, too near lowers it."""
    if config.kl_target is None or not mean_kl > 0:  # a step that measured none, or not a number, says nothing
        return kl_beta
    error = min(0.2, max(-0.2, mean_kl / config.kl_target - 1))
    return min(config.kl_beta * ADAPT_RANGE, max(config.kl_beta / ADAPT_RANGE, kl_beta * (1 + ADAPT_RATE * error)))
