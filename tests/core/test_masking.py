"""Which positions are masked."""

import numpy as np
import pytest
import torch

from core.masking import MASKS, MaskConfig, check_masks, draw_mask, masked_positions


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_hides_the_share_that_was_asked_for(name):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 96, size=64)
    tokens[::9] = 0
    shares = [draw_mask(rng, tokens, {name: 1.0}, 0.25, 0.25, newline=0).mean() for _ in range(200)]
    assert set(shares) == {0.25}


def test_span_masks_are_runs_and_line_masks_spare_newlines():
    rng = np.random.default_rng(0)
    tokens = np.ones(128, dtype=np.int64)
    tokens[31::32] = 0
    masks = {name: [MASKS[name](rng, tokens, 40, 0).astype(int) for _ in range(100)] for name in ("span", "random")}
    runs = {name: (np.diff(found, prepend=0) == 1).sum() for name, found in masks.items()}
    assert runs["span"] < 0.6 * runs["random"]
    for _ in range(50):
        assert not MASKS["line"](rng, tokens, 40, 0)[tokens == 0].any()
    only_newlines = np.zeros(16, dtype=np.int64)
    assert draw_mask(rng, only_newlines, {"line": 1.0}, 0.3, 0.3, newline=0).any(), "never a problem without a mask"


@pytest.mark.parametrize("setting, message", [
    ({"mask_low": 0.9}, "mask_low=0.9"), ({"masks": {}}, "masks="), ({"masks": {"random": 0.0}}, "masks="),
    ({"masks": {"random": 1.0, "lines": 1.0}}, "masks=")])
def test_settings_that_mask_nothing_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        check_masks(MaskConfig(**setting).masks)


def test_masked_positions_are_those_of_a_loop():
    mask = torch.rand(20, 9) < 0.4
    mask[0], mask[1] = True, False
    position, hidden = masked_positions(mask, "cpu")
    assert position.shape == hidden.shape == (20, 9) and (position.dtype, hidden.dtype) == (torch.int64, torch.bool)
    for row, columns, real in zip(mask.tolist(), position.tolist(), hidden.tolist(), strict=True):
        expected = [i for i, masked in enumerate(row) if masked]
        assert columns[: len(expected)] == expected and real == [True] * len(expected) + [False] * (9 - len(expected))
