"""Per-input baselines: how much better a completion is than its group."""

import torch


def group_std(reward, total):
    """(r - mean) / (std + 1e-4) within the group: GRPO, arXiv 2402.03300 eq. 4; std with G - 1, as in TRL."""
    return (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)


def group_mean(reward, total):
    """r - mean of the group: Dr. GRPO, arXiv 2503.20783; no division that favours groups of nearly equal rewards."""
    return reward - reward.mean(1, keepdim=True)


def leave_one_out(reward, total):
    """r - mean of the others: RLOO, arXiv 2402.14740; an unbiased baseline, G / (G - 1) times group_mean."""
    G = reward.shape[1]
    return (reward - reward.mean(1, keepdim=True)) * G / (G - 1)


def batch_std(reward, total):
    """(r - mean of the group) / (one standard deviation of that over the whole step, all ranks, + 1e-4)."""
    centred = reward - reward.mean(1, keepdim=True)                                  # (P, G)
    squares, count = total(torch.stack((centred.square().sum(), centred.new_tensor(float(centred.numel())))))
    return centred / ((squares / (count - 1)).sqrt() + 1e-4)


ADVANTAGES = {"group_std": group_std, "group_mean": group_mean, "leave_one_out": leave_one_out, "batch_std": batch_std}


def compute_advantages(reward, name, total=lambda x: x):
    """reward: (P, G); total: sums a tensor over ranks. Returns (P, G); a group of equal rewards gets exactly 0."""
    equal = (reward == reward[:, :1]).all(1, keepdim=True)                           # (P, 1) rounding must not leave 1e-9
    return ADVANTAGES[name](reward, total).masked_fill(equal, 0.0)
