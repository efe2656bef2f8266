"""Batches rows of like length, so that there is little padding and memory stays bounded."""

import numpy as np
import torch


def parts_of_like_length(length, overhead):
    """Cuts rows into parts of like length, each padded to its longest row. Of all cuts it takes the one with the fewest
    tokens, where padding counts, and each part counts as `overhead` more.

    length: (n,) on the CPU; overhead: the cost of reading one more part, in tokens
    Returns a list of index tensors, the longest rows first; each is in ascending order
    """
    # Rows of equal length stay together, so the D different lengths, from the longest on, are cut into runs. The best
    # cut of the first j lengths is the best cut of the first i, for some i, and then one part from i to j.
    falling = -np.asarray(length)
    values, kind, count = np.unique(falling, return_inverse=True, return_counts=True)
    longest = -values                                                                # (D,)
    D = len(longest)
    before = np.zeros(D + 1, dtype=int)                                              # (D + 1,) rows of longer ones
    before[1:] = count.cumsum()
    cost = np.zeros(D + 1)                                                           # (D + 1,) of the best cut up to j
    start = np.zeros(D + 1, dtype=int)                                               # (D + 1,) of its last part
    for j in range(1, D + 1):
        rows = before[j] - before[:j]                                                # (j,) in the part from i to j
        each = cost[:j] + longest[:j] * rows + overhead                              # (j,)
        start[j] = each.argmin()
        cost[j] = each[start[j]]
    parts = []
    end = D
    while end:
        in_part = (kind >= start[end]) & (kind < end)                                # (n,)
        rows, = in_part.nonzero()
        parts.append(torch.from_numpy(rows))
        end = start[end]
    return parts[::-1]


def parts_of_tokens(size, most):
    """Cuts rows, the largest first, into parts of at most `most` tokens, counting padding to the largest row of a part.
    A row of more tokens is a part by itself.

    size: (n,) tokens of each row, on the CPU
    Returns a list of index tensors, each in ascending order
    """
    parts = []
    largest = 0  # tokens of the first row of the last part
    rows = torch.as_tensor(size).argsort(descending=True, stable=True)
    for row in rows.tolist():
        if not parts or largest * (len(parts[-1]) + 1) > most:
            parts.append([])
            largest = int(size[row])
        parts[-1].append(row)
    return [torch.tensor(sorted(part)) for part in parts]
