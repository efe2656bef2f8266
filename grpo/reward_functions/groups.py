"""Computed from the rewards of a whole group: normalised rewards (GDPO) and weights for pass@k."""

import torch


def normalised(values, G):
    """Each reward minus its group's mean, divided by the standard deviation there plus 1e-4 (arXiv 2601.05242).

    values: {name: (N,)}, NaN where skipped. In float64, because the sum of rewards that cancel must be 0
    """
    out = {}
    for name, x in values.items():
        x = x.double().view(-1, G)                                                   # (P, G)
        count = (~x.isnan()).sum(1, keepdim=True)                                    # (P, 1)
        apart = x - x.nanmean(1, keepdim=True)                                       # (P, G)
        squares = apart.square().nansum(1, keepdim=True)                             # (P, 1)
        std = (squares / (count - 1).clamp(min=1)).sqrt()                            # (P, 1)
        out[name] = (apart / (std + 1e-4)).flatten()
    return out


def pass_k_weight(right, k):
    """The factor on each leave-one-out advantage that makes its expected gradient the one of pass@k.

    right: (P, G) 1 right, 0 wrong, NaN neither. Returns (P, G): k times the chance that k - 1 others of the group,
    drawn without replacement from those right or wrong, are all wrong (arXiv 2508.10751); 1 with fewer such others.
    """
    scored = (~right.isnan()).float()                                                # (P, G)
    wrong = (right == 0).float()                                                     # (P, G)
    others = scored.sum(1, keepdim=True) - scored                                    # (P, G) without the completion
    wrong_others = wrong.sum(1, keepdim=True) - wrong                                # (P, G)
    weight = torch.full_like(others, float(k))
    for j in range(k - 1):
        wrong_left = (wrong_others - j).clamp(min=0)
        weight = weight * wrong_left / (others - j).clamp(min=1)
    return torch.where(others < k - 1, 1.0, weight)
