"""The penalty that keeps the policy near a reference, or draws it to a teacher: estimators of the KL divergence, the
controller of its weight, and how the reference moves."""

import math

import torch

ADAPT_RATE, ADAPT_RANGE = 0.1, 100.0  # kl_beta moves by at most a fifth of the rate at once, within this factor


def exact_kl(logp, ref_logp):
    """KL(policy || reference) summed over the vocabulary, with its gradient. (..., V), (..., V) -> (...)."""
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def k2(logp, ref_logp):
    """(log ratio)^2 / 2 of sampled tokens: its gradient is in expectation that of the KL on-policy. (...) -> (...)."""
    return (logp - ref_logp).clamp(-20, 20).square() / 2


def k3(logp, ref_logp):
    """exp(x) - x - 1 with x = ref_logp - logp, never negative, unbiased as a value (arXiv 2402.03300 eq. 4)."""
    x = (ref_logp - logp).clamp(-20, 20)
    return x.expm1() - x  # exp(x) - x - 1 would round to values below 0 where the policies are close


KL_ESTIMATORS = {"k2": k2, "k3": k3}  # from the log-probabilities of sampled tokens; "exact" sums over the vocabulary


def choose_estimator(config, policy):
    """The config's kl_estimator, or the policy's default. KL in the reward needs an estimator from samples; a teacher
    teaches more with its whole distribution."""
    if config.kl_estimator is not None:
        return config.kl_estimator
    if config.kl_in_reward:
        return "k3"
    return policy.kl_estimator if config.teacher_checkpoint is None else "exact"


def kl_weight(config):
    """The weight of the KL: kl_beta of a reference, distill_beta of a teacher."""
    return config.kl_beta if config.teacher_checkpoint is None else config.distill_beta


def kl_per_token(scores, rollouts, estimator, ratio=None):
    """The KL of each token (N, M) by the run's estimator, or None without a reference.

    scores: a Scores of grpo/scoring.py, under the policy that is trained
    ratio: (N, M) to the policy that sampled, as importance weights, or None outside of training. E[r k3] is the KL, so
        the gradient flows through r too; k2 has the KL's gradient alone: r is then constant (arXiv 2510.01555)
    """
    if rollouts.ref_logp is None:
        return scores.kl
    kl = KL_ESTIMATORS[estimator](scores.logp, rollouts.ref_logp)
    if ratio is None:
        return kl
    return (ratio.detach() if estimator == "k2" else ratio) * kl


def kl_penalty(kl, weight, config):
    """The term of the loss: kl_weight times the weighted KL (N, M); 0 with kl_in_reward, where the reward has it."""
    beta = 0.0 if config.kl_in_reward else kl_weight(config)
    return torch.where(weight > 0, kl * weight, 0.0).sum() * beta


def kl_as_reward(rollouts, beta):
    """-beta log(p / p_ref) of each sampled token (N, M), whose mean is -beta times the KL (estimator k1)."""
    log_ratio = rollouts.old_logp - rollouts.ref_logp                                # (N, M)
    return -beta * log_ratio.masked_fill(rollouts.mask == 0, 0.0)


def adapted(kl_beta, mean_kl, config):
    """kl_beta after a step, by a proportional controller within bounds (arXiv 1909.08593 section 2.2)."""
    if config.kl_target is None or not 0 < mean_kl < math.inf:  # no KL was measured, or it is not finite
        return kl_beta
    error = min(0.2, max(-0.2, mean_kl / config.kl_target - 1))
    moved = kl_beta * (1 + ADAPT_RATE * error)
    return min(config.kl_beta * ADAPT_RANGE, max(config.kl_beta / ADAPT_RANGE, moved))


def static(reference, policy, iteration, config):
    """Never changes."""


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
    """True if a run has a reference: with kl_beta=0 there is nothing to keep near it. A teacher is one."""
    return REFERENCES[config.reference_mode] is not None and kl_weight(config) > 0
