"""Batches rows of similar length, to reduce padding and bound memory."""

import numpy as np
import torch


def parts_of_like_length(length, overhead):
    """Splits rows into parts of similar length, each padded to its longest row. It returns the cheapest split: the cost
    is the number of tokens, including padding, plus `overhead` per part.

    length: (n,) on the CPU; overhead: in tokens
    Returns a list of index tensors, the longest rows first; each is in ascending order
    """
    # Rows of equal length stay together, so the D distinct lengths, in descending order, are split into runs. The best
    # split of the first j lengths is, for some i, the best split of the first i and a part of lengths i to j - 1.
    falling = -np.asarray(length)
    values, which, count = np.unique(
        falling,
        return_inverse=True,
        return_counts=True)
    lengths = -values                                                                # (D,) the longest first
    D = len(lengths)
    before = np.zeros(D + 1, dtype=int)                                              # rows of the first j lengths
    before[1:] = count.cumsum()
    cost = np.zeros(D + 1)                                                           # of the best split up to j
    start = np.zeros(D + 1, dtype=int)                                               # i of the last part in this split
    for j in range(1, D + 1):
        rows = before[j] - before[:j]                                                # (j,) in a last part from i on
        tokens = lengths[:j] * rows                                                  # (j,)
        costs = cost[:j] + tokens + overhead                                         # (j,)
        start[j] = costs.argmin()
        cost[j] = costs[start[j]]
    parts = []
    end = D
    while end > 0:
        in_part = (which >= start[end]) & (which < end)                              # (n,)
        rows = in_part.nonzero()[0]
        parts.append(torch.from_numpy(rows))
        end = start[end]
    return parts[::-1]


def parts_of_tokens(size, most):
    """Splits rows, the largest first, into parts of at most `most` tokens, including padding to the largest row of the
    part. A row of more tokens gets its own part.

    size: (n,) tokens of each row, on the CPU
    Returns a list of index tensors, each in ascending order
    """
    parts = []
    part = []
    largest = 0  # tokens of the first row of this part
    size = torch.as_tensor(size)
    rows = size.argsort(descending=True, stable=True)
    for row in rows.tolist():
        if not part or largest * (len(part) + 1) > most:
            part = []
            parts.append(part)
            largest = int(size[row])
        part.append(row)
    return [torch.tensor(sorted(part)) for part in parts]
