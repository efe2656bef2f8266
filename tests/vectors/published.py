"""Losses written from the formulas of other projects, for the checker; README.md says what it finds.

python grpo/tools/check_loss.py tests/vectors/published.py:verl
"""

import torch


def surrogate(logp, old_logp, advantage):
    """The clipped ratio times the advantage, and without the clip."""
    r, A = (logp - old_logp).exp(), advantage[:, None]
    return r.clamp(0.8, 1.2) * A, r * A


def k3(logp, ref_logp):
    return (ref_logp - logp).exp() - (ref_logp - logp) - 1


def verl(logp, old_logp, ref_logp, advantage, mask, total_tokens):
    """verl: loss_agg_mode token-mean with kl_loss_type low_var_kl, without its dual clip."""
    term = torch.minimum(*surrogate(logp, old_logp, advantage)) - 0.04 * k3(logp, ref_logp)
    return -(term * mask).sum() / total_tokens


def nanochat(logp, old_logp, ref_logp, advantage, mask):
    """nanochat's chat_rl.py: REINFORCE, each pass divided by its own tokens."""
    return -(logp * advantage[:, None] * mask).sum() / mask.sum()


def dr_grpo(logp, old_logp, ref_logp, advantage, mask, max_tokens):
    """Dr. GRPO (arXiv 2503.20783, listing 1): sums of tokens over the limit, without a KL."""
    return -(torch.minimum(*surrogate(logp, old_logp, advantage)) * mask).sum(1).mean() / max_tokens


def minimind(logp, old_logp, ref_logp, advantage, mask):
    """minimind's train_grpo.py with loss_type grpo."""
    term = torch.minimum(*surrogate(logp, old_logp, advantage)) - 0.04 * k3(logp, ref_logp)
    return -((term * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def book(logp, old_logp, ref_logp, advantage, mask):
    """reasoning-from-scratch, chapter 7: max where A < 0, mean of log p - log p_ref; there of sums of tokens."""
    pair = surrogate(logp, old_logp, advantage)
    term = torch.where(advantage[:, None] >= 0, torch.minimum(*pair), torch.maximum(*pair)) - 0.04 * (logp - ref_logp)
    return -((term * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()
