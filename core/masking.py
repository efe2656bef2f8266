"""Masks windows of tokens, which makes them fill-in problems."""

import numpy as np

from core.settings.setting import Settings, is_inside, setting

MASKS = {}  # {name: function(rng, tokens, count, newline) -> (T,) bool}


def mask(fn):
    """Adds a kind of mask under the function's name. A user's file adds one in this way too."""
    MASKS[fn.__name__] = fn
    return fn


@mask
def random(rng, tokens, count, newline):
    """Masks `count` single positions, drawn uniformly."""
    return in_lines(rng, tokens, count, newline=-1)


@mask
def in_lines(rng, tokens, count, newline):
    """Masks `count` single positions but no newline; all others, if there are fewer."""
    mask = np.zeros(len(tokens), dtype=bool)
    inside = np.flatnonzero(tokens != newline)
    chosen = rng.choice(inside, size=min(count, len(inside)), replace=False)
    mask[chosen] = True
    return mask


@mask
def span(rng, tokens, count, newline, mean_span=5):
    """Masks runs of positions with geometrically distributed lengths, until `count` positions are masked."""
    mask = np.zeros(len(tokens), dtype=bool)
    while mask.sum() < count:
        length = min(rng.geometric(1 / mean_span), count - mask.sum())
        start = rng.integers(len(tokens) - length + 1)
        mask[start : start + length] = True
    return mask


@mask
def line(rng, tokens, count, newline):
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


class MaskConfig(Settings):
    """The settings of masking, for all scripts that mask text."""

    excludes = (("mask_low>mask_high", "", "it must be at most mask_high"),)

    masks: dict | None = setting(
        None, "{random, in_lines, span, line, or a @mask function of yours: weight}; None: random and span, 1.0 each")
    mask_low: float = setting(0.2, "smallest masked share of a text; drawn for each text", "(0, 1]")
    mask_high: float = setting(0.5, "largest masked share of a text", "(0, 1]")

    def __post_init__(self):
        super().__post_init__()
        if self.masks is None:
            vars(self)["masks"] = {"random": 1.0, "span": 1.0}


def check_masks(masks):
    """masks, {key of MASKS: weight}; None: single positions alone. Raises ValueError for a key or weight that cannot
    be."""
    masks = {"random": 1.0} if masks is None else masks
    if not masks or not masks.keys() <= MASKS.keys() or not all(is_inside(w, "(0, 1e6]") for w in masks.values()):
        raise ValueError(f"masks={masks} must have weights above 0 of {', '.join(MASKS)}, or of your @mask functions")
    return masks


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
        return random(rng, tokens, count, newline)
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
