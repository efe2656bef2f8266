"""What a completion is worth to the judge: as a whole, and near each token."""

import torch

from core.judge import calculate_judge_scores, calculate_realness


@torch.no_grad()
def compute_rewards(rollouts, judge, tokenizer, group_size, credit_window=None):
    """Scores every completion with the frozen judge.

    Returns reward (P, G), the judge's score in [0, 1], and credit: reward itself as (P, G, 1), or with credit_window=W
    (P, G, M), the mean realness of the text within W positions of each chosen token.
    """
    if credit_window is None:
        reward = calculate_judge_scores(judge, rollouts.text, tokenizer.cls_token_id).view(-1, group_size)
        return reward, reward[..., None]
    realness = calculate_realness(judge, rollouts.text)                              # (N, T)
    near = windowed_mean(realness, credit_window).gather(1, rollouts.position[rollouts.row])
    return realness.mean(1).view(-1, group_size), near.view(-1, group_size, near.shape[1])


def windowed_mean(x, width):
    """Mean of x (N, T) over the positions at most `width` away, those inside the text. Returns (N, T)."""
    T = x.shape[1]
    total = torch.cat((torch.zeros_like(x[:, :1]), x.cumsum(1)), dim=1)              # (N, T + 1)
    place = torch.arange(T, device=x.device)
    low, high = (place - width).clamp(min=0), (place + width + 1).clamp(max=T)       # (T,)
    return (total[:, high] - total[:, low]) / (high - low)
