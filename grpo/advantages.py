"""Baselines: how much better a completion is than its group, or than the step."""

import torch


def centred(reward, mask):
    """(r - mean of the group, number in the group), over those where mask is 1. (P, G, K) -> (P, G, K), (P, 1, K).

    In a group of equal rewards exactly 0, not what rounding leaves of it.
    """
    count = mask.sum(1, keepdim=True)
    mean = (reward * mask).sum(1, keepdim=True) / count.clamp(min=1)
    most = reward.masked_fill(mask == 0, -torch.inf).amax(1, keepdim=True)           # (P, 1, K)
    equal = most <= reward.masked_fill(mask == 0, torch.inf).amin(1, keepdim=True)
    return (reward - mean).masked_fill(equal, 0.0) * mask, count


def group_std(reward, mask, total):
    """(r - mean) / (std + 1e-4) within the group: GRPO, arXiv 2402.03300 section 4.1.2; std with G - 1, as in TRL."""
    x, count = centred(reward, mask)
    return x / ((x.square().sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt() + 1e-4)


def group_mean(reward, mask, total):
    """r - mean of the group: Dr. GRPO, arXiv 2503.20783; no division that favours groups of nearly equal rewards."""
    return centred(reward, mask)[0]


def leave_one_out(reward, mask, total):
    """r - mean of the others: RLOO, arXiv 2402.14740; an unbiased baseline, G / (G - 1) times group_mean."""
    x, count = centred(reward, mask)
    return x * count / (count - 1).clamp(min=1)


def batch_std(reward, mask, total):
    """(r - mean of the group) / (one standard deviation of that over the whole step, all ranks, + 1e-4)."""
    x, _ = centred(reward, mask)
    squares, count = total(torch.stack((x.square().sum(), mask.sum().to(x.dtype))))
    return x / ((squares / (count - 1).clamp(min=1)).sqrt() + 1e-4)


def step(reward, mask, total):
    """(r - mean) / (std + 1e-4), both over the whole step, all ranks: REINFORCE++, arXiv 2501.03262. A group has no
    baseline of its own, so one whose rewards are all equal still counts."""
    count, summed = total(torch.stack((mask.sum(), (reward * mask).sum())))
    x = (reward - summed / count.clamp(min=1)) * mask
    x = x.masked_fill(x.abs() <= 1e-6 * reward.abs(), 0.0)  # what rounding leaves of equal rewards
    return x / ((total(x.square().sum()) / (count - 1).clamp(min=1)).sqrt() + 1e-4)


ADVANTAGES = {"group_std": group_std, "group_mean": group_mean, "leave_one_out": leave_one_out, "batch_std": batch_std,
              "step": step}


def compute_advantages(reward, name, mask=None, total=lambda x: x):
    """How much better than its group, along dim 1 (`step`: than the whole step).

    reward: (P, G, K), one reward per completion (K = 1) or per token (K = M)
    mask: (P, G, K), 0.0 on padding and on completions that were not scored, which no baseline sees
    total: sums a tensor over ranks
    Returns (P, G, K); exactly 0 where a group's rewards are all equal (`step`: where all of the step's are)
    """
    mask = torch.ones_like(reward) if mask is None else mask.expand_as(reward)
    return ADVANTAGES[name](reward, mask, total) * mask
