"""Batches rows of like length, so that there is little padding and memory stays bounded."""

import numpy as np
import torch


def parts_of_like_length(length, overhead):
    """The rows in parts of like length. Each part is padded to its longest row. The cut is the one with the fewest
    tokens, where padding counts, and each part counts as `overhead` more.

    length: (n,) on the CPU; overhead: what reading one more part costs, in tokens
    Returns a list of index tensors, the longest rows first; each is in ascending order
    """
    values, kind, count = np.unique(-np.asarray(length), return_inverse=True, return_counts=True)
    longest = -values                                                                # (D,)
    before = np.concatenate(([0], count.cumsum()))                                   # (D + 1,)
    cost = np.zeros(len(longest) + 1)                                                # (D + 1,) of the best cut up to j
    start = np.zeros(len(longest) + 1, dtype=int)                                    # (D + 1,) of its last part
    for j in range(1, len(cost)):
        each = cost[:j] + longest[:j] * (before[j] - before[:j]) + overhead          # (j,) if the last part begins at i
        start[j] = each.argmin()
        cost[j] = each[start[j]]
    parts = []
    end = len(longest)
    while end:
        in_part = (kind >= start[end]) & (kind < end)                                # (n,)
        parts.append(torch.from_numpy(in_part.nonzero()[0]))
        end = start[end]
    return parts[::-1]


def parts_of_tokens(size, most):
    """The rows, the largest first, in parts of at most `most` tokens, where each row of a part takes as many as its
    largest one; a larger row is a part of its own.

    size: (n,) tokens of each row, on the CPU
    Returns a list of index tensors, each in ascending order
    """
    parts, tokens = [], 0
    for row in torch.as_tensor(size).argsort(descending=True, stable=True).tolist():
        if not parts or tokens * (len(parts[-1]) + 1) > most:
            parts.append([])
            tokens = int(size[row])
        parts[-1].append(row)
    return [torch.tensor(sorted(part)) for part in parts]
