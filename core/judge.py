"""Scores of a judge: the realness of each token of a text, and of the text as a whole."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK = 32        # texts per forward pass on a CPU; its cache holds no more
LARGE_CHUNK = 64  # texts per forward pass on a GPU, to bound memory


@torch.no_grad()
def calculate_realness(judge: nn.Module, text: Tensor, cls_token_id: int | None = None) -> Tensor:
    """Returns the judge's probability (N, T) that each token of text (N, T) is the true token.

    A cls judge reads CLS + text and gives one number for all tokens of a text: 1 - the share that was replaced, (N, 1).
    """
    is_cls = judge.judge_head == "cls"
    if is_cls:
        cls = torch.full_like(text[:, :1], cls_token_id)
        text = torch.cat((cls, text), 1)
    chunk = CHUNK if text.device.type == "cpu" else LARGE_CHUNK
    parts = []
    for part in text.split(chunk):
        estimate = judge(part).sigmoid()
        parts.append(estimate)
    estimates = torch.cat(parts)                                                     # (N, T), of a cls judge (N,)
    if is_cls:
        return 1 - estimates[:, None]
    return estimates


def calculate_judge_scores(judge: nn.Module, text: Tensor, cls_token_id: int) -> Tensor:
    """Scores each text (N, T) in [0, 1], (N,); 1 means that it looks written by a human. A realness judge gives the
    mean probability that a token is the true token, a cls judge 1 - the replaced share."""
    realness = calculate_realness(judge, text, cls_token_id)
    return realness.mean(1)


def log_odds(probability: Tensor) -> Tensor:
    """Returns the log-odds of a probability, clamped so that one token that the judge is certain about does not
    outweigh all others."""
    return probability.clamp(1e-3, 1 - 1e-3).logit()


def windowed_mean(x: Tensor, width: int) -> Tensor:
    """Averages x (N, T) over the positions in the text that are at most `width` away. Returns (N, T)."""
    T = x.shape[1]
    # The sum of a window is the difference of two running sums, so its cost does not depend on the width
    running = F.pad(x.cumsum(1), (1, 0))                                             # (N, T + 1) sums before each
    position = torch.arange(T, device=x.device)
    low = (position - width).clamp(min=0)                                            # (T,)
    high = (position + width + 1).clamp(max=T)                                       # (T,)
    sums = running[:, high] - running[:, low]                                        # (N, T)
    return sums / (high - low)
