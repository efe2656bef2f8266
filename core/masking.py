"""Masks windows of tokens, which makes them fill-in problems."""

from dataclasses import dataclass

import numpy as np

from core.settings.ranges import check_ranges


def random_mask(rng, tokens, count, newline):
    """Masks `count` single positions, drawn uniformly."""
    return in_lines_mask(rng, tokens, count, newline=-1)


def in_lines_mask(rng, tokens, count, newline):
    """Masks `count` single positions but no newline; all others, if there are fewer."""
    mask = np.zeros(len(tokens), dtype=bool)
    inside = np.flatnonzero(tokens != newline)
    chosen = rng.choice(inside, size=min(count, len(inside)), replace=False)
    mask[chosen] = True
    return mask


def span_mask(rng, tokens, count, newline, mean_span=5):
    """Masks runs of positions with geometrically distributed lengths, until `count` positions are masked."""
    mask = np.zeros(len(tokens), dtype=bool)
    while mask.sum() < count:
        length = min(rng.geometric(1 / mean_span), count - mask.sum())
        start = rng.integers(len(tokens) - length + 1)
        mask[start : start + length] = True
    return mask


def line_mask(rng, tokens, count, newline):
    """Masks whole lines in random order until `count` positions are masked; of the last line only as much as needed.
    Newlines are not masked."""
    mask = np.zeros(len(tokens), dtype=bool)
    ends = tokens == newline                                                         # (T,)
    line = ends.cumsum() - ends                                                      # (T,) number of each token's line
    for i in rng.permutation(line[-1] + 1):
        inside = np.flatnonzero((line == i) & ~ends)
        mask[inside[: count - mask.sum()]] = True
        if mask.sum() >= count:
            break
    return mask


MASKS = {"random": random_mask, "in_lines": in_lines_mask, "span": span_mask, "line": line_mask}
RANGES = {f"mask_{name}": "[0, 1e6]" for name in MASKS} | {"mask_low": "(0, 1]", "mask_high": "(0, 1]"}


@dataclass(frozen=True)
class MaskConfig:
    """The settings of masking, for all scripts that mask text."""

    # data
    mask_random: float = 1.0               # weight of masking single positions, relative to the other weights
    mask_in_lines: float = 0.0             # weight of masking single positions that are not newlines
    mask_span: float = 1.0                 # weight of masking runs of positions
    mask_line: float = 0.0                 # weight of masking whole lines
    mask_low: float = 0.2                  # smallest masked share of a text; drawn for each text
    mask_high: float = 0.5                 # largest masked share of a text

    def __post_init__(self):
        check_ranges(self, RANGES)
        if self.mask_low > self.mask_high:
            raise ValueError(f"mask_low={self.mask_low} must be at most mask_high={self.mask_high}")
        if not self.masks:
            raise ValueError("mask_random, mask_in_lines, mask_span, mask_line are 0: a batch without masks; raise one")

    @property
    def masks(self):
        """{key of MASKS: weight}, without the weights that are 0."""
        weights = {name: getattr(self, f"mask_{name}") for name in MASKS}
        return {name: weight for name, weight in weights.items() if weight > 0}


def draw_mask(rng, tokens, weights, low, high, newline):
    """Draws a mask: its share of the window from [low, high], and the kind of mask in proportion to `weights`.

    tokens: (T,) ids; weights: {key of MASKS: weight}; newline: the id that ends a line
    Returns (T,) bool, True where masked, with at least one True
    """
    p = np.array(list(weights.values()))
    name = rng.choice(list(weights), p=p / p.sum())
    share = rng.uniform(low, high)
    count = max(1, round(share * len(tokens)))
    mask = MASKS[name](rng, tokens, count, newline)
    if not mask.any():  # newlines alone: no line to mask
        return random_mask(rng, tokens, count, newline)
    return mask


def masked_positions(mask, device):
    """The positions of the masked tokens of each row. M is the largest number of them in a row.

    mask: (B, T) bool on the CPU
    Returns position (B, M) int64 on `device`, the masked positions in order and then padding, and hidden (B, M) bool on
    the CPU, False on padding
    """
    hidden, order = mask.int().sort(dim=1, descending=True, stable=True)             # (B, T) each, masked ones first
    M = int(mask.sum(1).max())
    position = order[:, :M].to(device)
    return position, hidden[:, :M].bool()
