"""Computed from the rewards of a whole group: normalised rewards (GDPO), weights for pass@k, credit of turns."""

import torch


def normalised(values, G):
    """Each reward minus its mean within the group, divided by its standard deviation there plus 1e-4, so that the range
    of a reward does not decide how much it counts (arXiv 2601.05242).

    values: {name: (N,)}, NaN where skipped, which stays NaN and counts in neither
    In float64, because the sum of rewards that cancel must be 0.
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

    right: (P, G) 1 right, 0 wrong, NaN neither. Returns (P, G): k times the chance that k - 1 other completions of the
    group, drawn without replacement from those that are right or wrong, are all wrong (arXiv 2508.10751, without the
    completion itself). With fewer than k - 1 such others the chance cannot be estimated, and the factor is 1.
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


def credit_of_turns(other, weight, turns, M):
    """The reward of each completion with what its environment gave from a turn on, by turn; and the turn of each token.

    other: (N,) weighted sums of the other rewards; weight: that of the reward 'environment'
    turns: N lists of (column in which a turn begins, its reward); M: columns of tokens
    Returns (N, K) for at most K turns, and (N, M) numbers of turns from 0 on
    """
    K = max(map(len, turns))
    to_come = torch.zeros(len(turns), K, dtype=torch.float64)
    turn = torch.zeros(len(turns), M, dtype=torch.long)
    for n, of_one in enumerate(turns):
        for k, (begin, _) in enumerate(of_one):
            to_come[n, k] = sum(reward for _, reward in of_one[k:])  # a difference of sums would round
            turn[n, begin:] = k
    return other[:, None] + weight * to_come.to(other), turn.to(other.device)
