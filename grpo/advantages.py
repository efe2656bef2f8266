"""Per-input baselines: how much better a completion is than its group."""

import torch


def group_std(reward, mask, total):
    """(r - mean) / (std + 1e-4) within the group: GRPO, arXiv 2402.03300 eq. 4; std with G - 1, as in TRL."""
    return (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)


def group_mean(reward, mask, total):
    """r - mean of the group: Dr. GRPO, arXiv 2503.20783; no division that favours groups of nearly equal rewards."""
    return reward - reward.mean(1, keepdim=True)


def leave_one_out(reward, mask, total):
    """r - mean of the others: RLOO, arXiv 2402.14740; an unbiased baseline, G / (G - 1) times group_mean."""
    G = reward.shape[1]
    return (reward - reward.mean(1, keepdim=True)) * G / (G - 1)


def batch_std(reward, mask, total):
    """(r - mean of the group) / (one standard deviation of that over the whole step, all ranks, + 1e-4)."""
    centred = (reward - reward.mean(1, keepdim=True)) * mask                         # (P, G, K)
    squares, count = total(torch.stack((centred.square().sum(), mask.sum().to(centred.dtype))))
    return centred / ((squares / (count - 1)).sqrt() + 1e-4)


ADVANTAGES = {"group_std": group_std, "group_mean": group_mean, "leave_one_out": leave_one_out, "batch_std": batch_std}


def compute_advantages(reward, name, mask=None, total=lambda x: x):
    """How much better than its group, along dim 1.

    reward: (P, G, K), one reward per completion (K = 1) or per token (K = M); mask: (P, G, K), 0.0 on padding
    total: sums a tensor over ranks
    Returns (P, G, K); where a group's rewards are all equal, exactly 0
    """
    mask = torch.ones_like(reward) if mask is None else mask
    equal = (reward == reward[:, :1]).all(1, keepdim=True)                           # (P, 1, K) rounding must not show
    return ADVANTAGES[name](reward, mask, total).masked_fill(equal, 0.0) * mask
