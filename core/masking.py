"""How a window of tokens becomes a fill-in problem: which positions are hidden."""

import numpy as np


def random_mask(rng, tokens, count, newline):
    """`count` positions, each as likely as any other."""
    mask = np.zeros(len(tokens), dtype=bool)
    mask[rng.choice(len(tokens), size=count, replace=False)] = True
    return mask


def span_mask(rng, tokens, count, newline, mean_span=5):
    """Contiguous runs of geometric length, drawn until `count` positions are hidden."""
    mask = np.zeros(len(tokens), dtype=bool)
    while (left := count - mask.sum()) > 0:
        length = min(int(rng.geometric(1 / mean_span)), left)
        start = int(rng.integers(len(tokens) - length + 1))
        mask[start : start + length] = True
    return mask


def line_mask(rng, tokens, count, newline):
    """Whole lines in random order until `count` positions are hidden; the last one is cut to fit. Newlines stay."""
    mask = np.zeros(len(tokens), dtype=bool)
    line = np.cumsum(np.concatenate(([0], tokens[:-1] == newline)))                  # (T,) which line a token is in
    for i in rng.permutation(line[-1] + 1):
        inside = np.flatnonzero((line == i) & (tokens != newline))
        mask[inside[: count - mask.sum()]] = True
        if mask.sum() >= count:
            break
    return mask


MASKS = {"random": random_mask, "span": span_mask, "line": line_mask}


def draw_mask(rng, tokens, weights, low, high, newline):
    """Hides a share of the window drawn from [low, high], in a way drawn by `weights`.

    tokens: (T,) ids; weights: {name in MASKS: weight}; newline: the id that ends a line
    Returns (T,) bool with at least one True.
    """
    names = list(weights)
    p = np.array([weights[name] for name in names], dtype=float)
    name = names[int(rng.choice(len(names), p=p / p.sum()))]
    count = max(1, round(float(rng.uniform(low, high)) * len(tokens)))
    mask = MASKS[name](rng, tokens, count, newline)
    return mask if mask.any() else random_mask(rng, tokens, count, newline)  # a window of newlines has no line to hide
