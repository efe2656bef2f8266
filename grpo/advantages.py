"""Advantages: how much better a completion is than a baseline, the mean of its group or of the step."""

import torch


def centred(reward, mask):
    """The rewards minus the mean of their group, and how many count in each group. Only those where mask is 1 count.

    reward, mask: (P, G, 1 or M)
    Returns (P, G, 1 or M), exactly 0 in a group of equal rewards, without rounding errors, and (P, 1, 1 or M)
    """
    count = mask.sum(1, keepdim=True)
    summed = (reward * mask).sum(1, keepdim=True)
    mean = summed / count.clamp(min=1)
    out = mask == 0
    highest = reward.masked_fill(out, -torch.inf).amax(1, keepdim=True)              # (P, 1, 1 or M)
    lowest = reward.masked_fill(out, torch.inf).amin(1, keepdim=True)
    away = (reward - mean).masked_fill(highest <= lowest, 0.0)
    return away * mask, count


def over_std(x, squares, count):
    """x / (std + 1e-4), with the std of `count` numbers whose squares sum to `squares`; divided by count - 1."""
    variance = squares / (count - 1).clamp(min=1)
    return x / (variance.sqrt() + 1e-4)


def group_std(reward, mask, total):
    """(r - mean) / (std + 1e-4) within the group: GRPO, arXiv 2402.03300 section 4.1.2. The variance is divided by
    G - 1, as in TRL."""
    x, count = centred(reward, mask)
    return over_std(x, x.square().sum(1, keepdim=True), count)


def group_mean(reward, mask, total):
    """r - mean of the group: Dr. GRPO, arXiv 2503.20783."""
    return centred(reward, mask)[0]


def leave_one_out(reward, mask, total):
    """r - mean of the other completions of the group: RLOO, arXiv 2402.14740. It is G / (G - 1) times group_mean."""
    x, count = centred(reward, mask)
    return x * count / (count - 1).clamp(min=1)


def batch_std(reward, mask, total):
    """(r - mean of the group) / (std + 1e-4); the std is that of these differences over the step and all ranks."""
    x, _ = centred(reward, mask)
    return over_std(x, total(x.square().sum()), total(mask.sum()))


def max_rl(reward, mask, total):
    """(r - mean) / mean within the group, 0 where no completion is right: MaxRL, arXiv 2602.02710. With rewards of 0
    and 1 the expected gradient is the sum over k from 1 to G - 1 of that of pass@k / k."""
    counted = reward * mask
    if (counted < 0).any():
        raise ValueError(f"advantage='max_rl' is for rewards of success, 0 or 1, but one is {counted.min():g}")
    x, count = centred(reward, mask)
    mean = counted.sum(1, keepdim=True) / count.clamp(min=1)
    return x / mean.masked_fill(mean == 0, 1.0)


def step(reward, mask, total):
    """(r - mean) / (std + 1e-4), both over the whole step and all ranks: REINFORCE++, arXiv 2501.03262."""
    count = total(mask.sum())
    mean = total((reward * mask).sum()) / count.clamp(min=1)
    x = (reward - mean) * mask
    mean = total(x.sum()) / count.clamp(min=1)  # again: the mean of large rewards was rounded
    x = (x - mean) * mask
    equal = (total((x > 0).sum()) == 0) | (total((x < 0).sum()) == 0)
    x = x.masked_fill(equal & x.isfinite(), 0.0)  # of equal rewards only rounding errors are left
    return over_std(x, total(x.square().sum()), count)


ADVANTAGES = {"group_std": group_std, "group_mean": group_mean, "leave_one_out": leave_one_out, "batch_std": batch_std,
              "max_rl": max_rl, "step": step}


def compute_advantages(reward, name, mask=None, total=lambda x: x):
    """The advantage of each completion, or of each token, by the function `name` of ADVANTAGES.

    reward: (P, G, 1) one reward per completion, or (P, G, M) one per token
    mask:   the same shape, 0.0 on padding and on completions that were not scored: they do not count in any baseline
    Returns the same shape; exactly 0 where the rewards of a group are all equal (`step`: where those of the step are)
    """
    if mask is None:
        mask = torch.ones_like(reward)
    return ADVANTAGES[name](reward, mask, total) * mask
