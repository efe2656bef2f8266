"""Scores tokens of a large vocabulary in fewer passes over the logits than autograd would make, formula by formula."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from core.distributions import sampling_logp


def token_scores_in_few_passes(
        project: Callable,                   # states (K, C) to logits (K, V)
        temperature: float,
        h: Tensor,                           # (K, C) hidden states
        target: Tensor,                      # (K, g) ids
        kept: None,                          # all tokens may be drawn
        reference: Tensor | None) -> tuple:  # (K, V) log-probabilities
    """Returns log-probabilities (K, g), entropies (K,) without a gradient and, with a reference, exact KLs (K,)."""
    logits = project(h)
    full = sampling_logp(logits.detach(), temperature)                               # (K, V)
    logp, kl = TokenScores.apply(logits, full, temperature, target, reference)
    del logits  # frees them: the gradient needs only their graph
    # The entropy comes last: a part that is computed again ends with the last tensor that a gradient needs
    p = full.exp()
    return logp, -p.mul_(full).sum(-1), kl


class TokenScores(torch.autograd.Function):
    """Log-probabilities of tokens and exact KLs to a reference. The backward pass makes the gradient of the logits in
    place of the distributions; autograd, formula by formula, would make and pass over many more tensors (K, V)."""

    @staticmethod
    def forward(
            ctx: Any,
            logits: Tensor,                      # (K, V) they get the gradient; their values are not read
            logp: Tensor,                        # (K, V) their sampling_logp, detached; the backward pass overwrites it
            temperature: float,
            target: Tensor,                      # (K, g) ids
            reference: Tensor | None) -> tuple:  # (K, V) log-probabilities
        """Returns log-probabilities (K, g) and KLs (K,), or None without a reference."""
        kl = None
        if reference is not None:
            difference = logp - reference                                            # (K, V)
            kl = difference.mul_(logp.exp()).sum(-1)
        ctx.save_for_backward(logp, target, reference, kl)
        ctx.temperature = temperature
        return logp.gather(-1, target), kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_scores: Tensor, d_kl: Tensor | None) -> tuple:
        logp, target, reference, kl = ctx.saved_tensors
        d_scores = d_scores / ctx.temperature                                        # (K, g)
        # The gradient of a log-probability is 1 at its token, minus p; that of the KL is p (log p - log q - KL)
        factor = -d_scores.sum(-1, keepdim=True)                                     # (K, 1)
        if reference is None:
            p = logp.exp_()
        else:
            p = logp.exp()
            d_kl = d_kl[:, None] / ctx.temperature                                   # (K, 1)
            factor = factor - d_kl * kl[:, None]
            logp.sub_(reference)
            factor = torch.addcmul(factor, logp, d_kl, out=logp)                     # (K, V)
        gradient = p.mul_(factor).scatter_add_(-1, target, d_scores)
        return gradient, None, None, None, None
