"""Optional changes of rewards and of what is trained on.

Those that a setting or an advantage turns on (shapes_of in grpo/step_settings.py) take and return rollouts and their
Scored; rewards: the Rewards that scored them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.distributed import Distributed
from core.errors import Mistake
from grpo.losses import compute_advantages, kl_as_reward
from grpo.metrics import equal_completions
from grpo.rollout import Rollouts, Scored, join
from grpo.sums import Sums

ROUNDING = 1e-3     # nats: penalties of equal completions that are as near are one
MOST_RESAMPLES = 3  # rounds of zero_std='resample'; groups whose rewards are then still equal are dropped


def gdpo(rollouts: Rollouts, scored: Scored, rewards: Any) -> tuple[Rollouts, Scored]:
    """The credit is the sum of rewards that are each normalised within their group (GDPO, arXiv 2601.05242). Without
    their values, as from a function that is no Rewards, the reward is the only one."""
    left_out, G = scored.reward.isnan().flatten().cpu(), rollouts.group_size         # (N,)
    values = scored.values or {"reward": scored.reward.flatten()}
    parts = normalised({name: x.cpu().masked_fill(left_out, torch.nan) for name, x in values.items()}, G)
    total = rewards.total(parts, G) if scored.values else parts["reward"]            # (N,)
    credit = total.round(decimals=6).float().to(scored.reward.device, non_blocking=True)
    return rollouts, replace(scored, credit=credit.view_as(scored.reward)[..., None])


def normalised(values: dict, G: int) -> dict:
    """The group_std of each reward, in float64, because the sum of rewards that cancel must be 0.
    values: {name: (N,)}, NaN where skipped"""
    out = {}
    for name, x in values.items():
        x = x.double().view(-1, G, 1)                                                # (P, G, 1)
        seen = ~x.isnan()                                                            # (P, G, 1)
        A = compute_advantages(torch.where(seen, x, 0.0), "group_std", seen)         # (P, G, 1)
        out[name] = A.masked_fill(~seen, torch.nan).flatten()
    return out


def train_pass_k(rollouts: Rollouts, scored: Scored, rewards: Any, k: int) -> tuple[Rollouts, Scored]:
    """Advantages are weighted so that their expected gradient is the one of pass@k."""
    right = rewards.right(scored.values).view_as(scored.reward)                      # (P, G)
    right = right.masked_fill(scored.reward.isnan(), torch.nan)
    return rollouts, replace(scored, weight=pass_k_weight(right, k)[..., None])


def pass_k_weight(right: Tensor, k: int) -> Tensor:
    """The factor on each leave-one-out advantage that makes its expected gradient the one of pass@k.

    right: (P, G) 1 right, 0 wrong, NaN neither. Returns (P, G): k times the chance that k - 1 others of the group,
    drawn without replacement from those right or wrong, are all wrong (arXiv 2508.10751); 1 with fewer such others.
    """
    scored = (~right.isnan()).float()                                                # (P, G)
    wrong = (right == 0).float()                                                     # (P, G)
    others = scored.sum(1, keepdim=True) - scored                                    # (P, G) without the completion
    wrong_others = wrong.sum(1, keepdim=True) - wrong                                # (P, G)
    weight = torch.full_like(others, float(k))
    for j in range(k - 1):
        wrong_left = (wrong_others - j).clamp(min=0)
        weight = weight * wrong_left / (others - j).clamp(min=1)
    return torch.where(others < k - 1, 1.0, weight)


def overlong_buffer(rollouts: Rollouts, scored: Scored, rewards: Any, buffer: int) -> tuple[Rollouts, Scored]:
    """The soft punishment of DAPO (arXiv 2503.14476 eq. 13): 0 up to `buffer` tokens below the limit, then down to -1
    at it."""
    length = rollouts.mask.sum(1)                                                    # (N,)
    penalty = ((rollouts.max_tokens - buffer - length) / buffer).clamp(-1.0, 0.0)    # (N,)
    return rollouts, penalised(scored, "overlong", penalty, rollouts.by_problem(penalty)[..., None])


def kl_in_reward(rollouts: Rollouts, scored: Scored, rewards: Any, beta: float) -> tuple[Rollouts, Scored]:
    """-beta times the KL to the reference is a part of the reward, of each token if the credit is. Equal completions
    of a group get equal penalties: rounding must not make a difference to learn from."""
    if rollouts.ref_logp is None:
        raise Mistake("kl_in_reward needs a reference; hand one over, such as policy.frozen()")
    per_token = of_first_equal(kl_as_reward(rollouts, beta), rollouts)  # (N, M)
    whole = per_token.sum(1)                                                         # (N,)
    penalty = per_token if scored.per_token else whole
    return rollouts, penalised(scored, "kl", whole, penalty.view(scored.credit.shape))


def of_first_equal(x: Tensor, rollouts: Rollouts) -> Tensor:
    """x (N, M) with the row of the first completion of its group that equals it, in tokens and nearly in the sum."""
    same = equal_completions(rollouts.by_problem(rollouts.target), rollouts.by_problem(rollouts.mask))  # (P, G, G)
    whole = rollouts.by_problem(x.sum(1))                                            # (P, G)
    away = (whole[:, :, None] - whole[:, None]).abs()                                # (P, G, G)
    first = (same & (away < ROUNDING)).int().argmax(2)                               # (P, G)
    return rollouts.by_problem(x).gather(1, first[..., None].expand(-1, -1, x.shape[1])).view_as(x)


def penalised(scored: Scored, name: str, value: Tensor, penalty: Tensor) -> Scored:
    """value: (N,), which is logged as a reward; penalty: (P, G, 1 or M)"""
    return replace(scored, penalty=scored.penalty + penalty, values=scored.values | {name: value})


def mask_truncated(rollouts: Rollouts, scored: Scored, rewards: Any) -> tuple[Rollouts, Scored]:
    """Completions that hit the limit on their tokens are not in the loss."""
    return replace(rollouts, train_mask=rollouts.train_mask * ~rollouts.truncated[:, None]), scored


def drop_equal(rollouts: Rollouts, scored: Scored) -> tuple[Rollouts, Scored]:
    """Only the groups whose rewards differ: from others nothing is learned."""
    useful = scored.differ().cpu().nonzero().squeeze(1)                              # (p,)
    return rollouts.select(useful)[0], scored.select(useful)


def resample_equal(rollouts: Rollouts, scored: Scored, collect: Callable, dist: Distributed,
                   sums: Sums) -> tuple[Rollouts, Scored]:
    """Groups of equal rewards are replaced by other problems, in at most MOST_RESAMPLES rounds (dynamic sampling, arXiv
    2503.14476 section 3.2).

    collect: (again, count) -> rollouts and Scored of `count` problems of another round
    """
    wanted, resampled = rollouts.problems, 0
    rollouts, scored = drop_equal(rollouts, scored)
    for again in range(1, MOST_RESAMPLES + 1):
        missing = wanted - rollouts.problems
        if not dist.agree(missing):  # no rank misses a group
            break
        if missing:
            resampled += missing
            more_rollouts, more_scored = drop_equal(*collect(again, missing))
            rollouts = join([rollouts, more_rollouts])
            scored = join([scored, more_scored])
    sums.mean("resampled", resampled, wanted)
    return rollouts, scored
