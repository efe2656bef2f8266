"""Attention, and which columns of a text a token reads."""

import torch
from torch.nn import functional as F


def attend(q, k, v, mask=None, causal=False, dropout=0.0):
    """Attention in the precision of its inputs. q: (B, H, T, D); k, v: (B, H, L, D); mask: as attention_mask returns
    it. Returns (B, H, T, D)."""
    causal = causal and mask is None and q.shape[2] > 1
    with torch.autocast(q.device.type, enabled=False):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, dropout_p=dropout)


def attention_mask(before, T, padding, device, causal=True):
    """The columns that each of T new positions of a model reads, of the before + T columns that there are.

    padding: (B,) number of leading columns without a token, or None; causal: whether a position reads none behind it
    Returns (1 or B, 1, T, before + T) bool, or None where the kernel's own causal mask, or none, is right. Every
    position reads itself, so that no softmax is empty.
    """
    if padding is None and (before == 0 or T == 1 or not causal):
        return None
    column = torch.arange(before + T, device=device)                                 # (before + T,)
    if not causal:
        return column >= padding[:, None, None, None]                                # (B, 1, 1, T)
    own = column[before:, None]                                                      # (T, 1)
    seen = column <= own                                                             # (T, before + T)
    if padding is None:
        return seen[None, None]
    real = column >= padding[:, None, None, None]                                    # (B, 1, 1, before + T)
    return (seen & real) | (column == own)
