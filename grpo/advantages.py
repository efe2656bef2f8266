"""Per-input baselines: how much better a completion is than its group."""

import torch


def centred(reward, mask):
    """(r - mean of the group, number in the group), over those where mask is 1. (P, G, K) -> (P, G, K), (P, 1, K)."""
    count = mask.sum(1, keepdim=True)
    mean = (reward * mask).sum(1, keepdim=True) / count.clamp(min=1)
    return (reward - mean) * mask, count


def group_std(reward, mask, total):
    """(r - mean) / (std + 1e-4) within the group: GRPO, arXiv 2402.03300 eq. 4; std with G - 1, as in TRL."""
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


ADVANTAGES = {"group_std": group_std, "group_mean": group_mean, "leave_one_out": leave_one_out, "batch_std": batch_std}


def compute_advantages(reward, name, mask=None, total=lambda x: x):
    """How much better than its group, along dim 1.

    reward: (P, G, K), one reward per completion (K = 1) or per token (K = M)
    mask: (P, G, K), 0.0 on padding and on completions that were not scored, which no baseline sees
    total: sums a tensor over ranks
    Returns (P, G, K); where a group's rewards are all equal, exactly 0
    """
    mask = torch.ones_like(reward) if mask is None else mask.expand_as(reward)
    seen, inf = mask > 0, torch.inf
    equal = (reward.masked_fill(~seen, -inf).amax(1, keepdim=True)
             <= reward.masked_fill(~seen, inf).amin(1, keepdim=True))                # (P, 1, K) rounding must not show
    return ADVANTAGES[name](reward, mask, total).masked_fill(equal, 0.0) * mask
