"""The reference of the KL: a frozen policy, which scores the rollouts once, a micro-batch at a time.

The reference and the weight of the KL may move between iterations.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.settings.setting import Settings
from grpo.losses import KL_ESTIMATORS
from grpo.rollout import Rollouts
from grpo.step_settings import StepSettings

if TYPE_CHECKING:
    from grpo.policies.policy import Policy

REFERENCE_MODES = ("none", "static", "ema", "periodic")
MOST_ERROR = 0.2     # the relative error of the KL is clipped to this
ADAPT_RATE = 0.1     # kl_beta moves by this share of the error at once, ...
ADAPT_RANGE = 100.0  # ... and stays within this factor of its start


@contextmanager
def placed_on(policy: "Policy", device: torch.device) -> Iterator:
    """Keeps the policy on the device within the block. A reference on the CPU (ref_offload) is copied to the device,
    and the copy is dropped afterwards."""
    if policy.device == device:
        yield
        return
    tensors = [*policy.model.parameters(), *policy.model.buffers()]
    waiting = [x.data for x in tensors]
    for x in tensors:
        x.data = x.data.to(device, non_blocking=True)
    try:
        yield
    finally:
        for x, data in zip(tensors, waiting, strict=True):
            x.data = data


@torch.no_grad()
def with_reference(
        rollouts: Rollouts,
        reference: "Policy | None",
        settings: StepSettings) -> Rollouts:
    """Scores the rollouts with the reference: with kl_estimator="exact" they get its distribution at every state, with
    other estimators the log-probabilities of the sampled tokens."""
    if reference is None:
        return rollouts
    is_exact = KL_ESTIMATORS[settings.kl_estimator] is None  # it has no formula for one token
    with placed_on(reference, rollouts.target.device):
        if not is_exact:
            ref_logp = logp_in_batches(reference, rollouts, settings)
            return replace(rollouts, ref_logp=ref_logp)
        distributions = [None] * rollouts.problems
        for part in rollouts.micro_batches(settings.batch_size, settings.micro_batch_tokens):
            micro, _ = rollouts.select(part)
            found = reference.distributions(micro, settings.temperature)
            for problem, logp in zip(part.tolist(), found, strict=True):
                distributions[problem] = logp
    inputs = replace(rollouts.inputs, reference=distributions)
    return replace(rollouts, inputs=inputs)


@torch.no_grad()
def logp_in_batches(policy: "Policy", rollouts: Rollouts, settings: StepSettings) -> Tensor:
    """Computes the log-probabilities (N, M) of the sampled tokens, a micro-batch at a time."""
    logp = torch.empty_like(rollouts.old_logp)
    for part in rollouts.micro_batches(settings.batch_size, settings.micro_batch_tokens):
        micro, rows = rollouts.select(part)
        scores = policy.score(micro, settings.temperature)
        logp[rows] = scores.logp
    return logp


# How the reference and kl_beta move

def adapted(kl_beta: float, mean_kl: float, config: Settings) -> float:
    """kl_beta after a step, by a proportional controller within bounds (arXiv 1909.08593 section 2.2)."""
    was_measured = 0 < mean_kl < math.inf
    if config.kl_target is None or not was_measured:
        return kl_beta
    error = mean_kl / config.kl_target - 1
    error = max(-MOST_ERROR, error)
    error = min(MOST_ERROR, error)
    moved = kl_beta * (1 + ADAPT_RATE * error)
    lowest = config.kl_beta / ADAPT_RANGE
    highest = config.kl_beta * ADAPT_RANGE
    moved = max(lowest, moved)
    return min(highest, moved)


@torch.no_grad()
def move_reference(
        reference: "Policy",
        policy: "Policy",
        iteration: int,  # the iteration that has ended, counted from 1
        config: Settings) -> None:
    """Moves the reference after an iteration, according to reference_mode.

    static: it stays
    ema: it follows the policy, reference = ema_alpha reference + (1 - ema_alpha) policy
    periodic: it becomes the policy every reference_update_freq iterations (TRL's ref_model_sync_steps)
    """
    if config.reference_mode == "ema":
        # parameters() has a tied matrix once; weights() has it under each of its names, so it would move twice
        for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
            new = new.to(old.device)
            old.lerp_(new, 1 - config.ema_alpha)
    if config.reference_mode == "periodic":
        if iteration % config.reference_update_freq == 0:
            reference.load_weights(policy.weights())


def needs_reference(config: Settings) -> bool:
    """True if a run needs a reference, which a KL of weight 0 does not. A teacher counts as a reference."""
    return config.reference_mode != "none" and config.kl_weight > 0
