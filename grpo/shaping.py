"""Optional changes of rewards, and of the completions to train on.

Settings turn on gdpo, train_pass_k, overlong_buffer, kl_in_reward and mask_truncated (shapes_of in
grpo/step_settings.py). These take and return rollouts and their Scored; rewards: the Rewards that scored them.
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

Shaped = tuple[Rollouts, Scored]
ROUNDING = 1e-3     # nats: a smaller difference between penalties of equal completions is rounding
MOST_RESAMPLES = 3  # rounds of zero_std='resample'; groups with rewards that are still equal are dropped


def gdpo(rollouts: Rollouts, scored: Scored, rewards: Any) -> Shaped:
    """Makes the credit a sum of rewards, each normalised within the group (GDPO, arXiv 2601.05242). A plain function
    gives no values of several rewards: its reward is the only one."""
    G = rollouts.group_size
    left_out = scored.reward.isnan().flatten().cpu()                                 # (N,)
    parts = {}
    for name, values in scored.values.items():
        values = values.cpu().masked_fill(left_out, torch.nan)                       # (N,)
        parts[name] = normalised(values, G)
    if parts:
        total = rewards.total(parts, G)                                              # (N,)
    else:
        total = normalised(scored.reward.flatten().cpu(), G)
    credit = total.round(decimals=6).float()
    reward = scored.reward                                                           # (P, G)
    credit = credit.to(reward.device, non_blocking=True).view_as(reward)
    return rollouts, replace(scored, credit=credit[..., None])


def normalised(values: Tensor, G: int) -> Tensor:
    """The group_std advantages of a reward, in float64, because the sum of rewards that cancel must be 0.
    values: (N,), NaN where skipped"""
    values = values.double().view(-1, G, 1)                                          # (P, G, 1)
    is_scored = ~values.isnan()
    values = values.masked_fill(~is_scored, 0.0)
    A = compute_advantages(values, "group_std", is_scored)                           # (P, G, 1)
    return A.masked_fill(~is_scored, torch.nan).flatten()


def train_pass_k(rollouts: Rollouts, scored: Scored, rewards: Any, k: int) -> Shaped:
    """Weights the advantages so that their expected gradient is the gradient of pass@k."""
    reward = scored.reward                                                           # (P, G)
    correct = rewards.correct(scored.values).view_as(reward)                         # (P, G)
    correct = correct.masked_fill(reward.isnan(), torch.nan)
    weight = pass_k_weight(correct, k)                                               # (P, G)
    return rollouts, replace(scored, weight=weight[..., None])


def pass_k_weight(correct: Tensor, k: int) -> Tensor:
    """The factor on each leave-one-out advantage that makes the expected gradient the gradient of pass@k.

    correct: (P, G) 1 correct, 0 wrong, NaN without a verdict. Returns (P, G): k times the chance that k - 1 other
    completions of the group with a verdict, drawn without replacement, are all wrong (arXiv 2508.10751); 1 if there
    are fewer others
    """
    judged = (~correct.isnan()).float()                                              # (P, G)
    wrong = (correct == 0).float()                                                   # (P, G)
    others = judged.sum(1, keepdim=True) - judged                                    # (P, G) without the completion
    wrong_others = wrong.sum(1, keepdim=True) - wrong                                # (P, G)
    weight = torch.full_like(others, float(k))
    for drawn in range(k - 1):
        wrong_left = (wrong_others - drawn).clamp(min=0)
        others_left = (others - drawn).clamp(min=1)
        weight = weight * wrong_left / others_left
    return weight.masked_fill(others < k - 1, 1.0)


def overlong_buffer(rollouts: Rollouts, scored: Scored, rewards: Any, buffer: int) -> Shaped:
    """Adds the soft overlong punishment of DAPO (arXiv 2503.14476 eq. 13): 0 up to `buffer` tokens below the limit,
    then falling to -1 at the limit."""
    length = rollouts.mask.sum(1)                                                    # (N,)
    room = rollouts.max_tokens - buffer - length                                     # (N,)
    penalty = (room / buffer).clamp(-1.0, 0.0)                                       # (N,)
    by_group = rollouts.by_problem(penalty)                                          # (P, G)
    return rollouts, penalised(scored, "overlong", penalty, by_group[..., None])


def kl_in_reward(rollouts: Rollouts, scored: Scored, rewards: Any, beta: float) -> Shaped:
    """Adds -beta times the KL to the reference to the reward, per token if the credit is per token. Equal completions
    of a group get equal penalties: rounding must not make a difference to learn from."""
    if rollouts.ref_logp is None:
        raise Mistake("kl_in_reward needs a reference; hand one over, such as policy.frozen()")
    per_token = equal_for_equal(kl_as_reward(rollouts, beta), rollouts)              # (N, M)
    whole = per_token.sum(1)                                                         # (N,)
    penalty = whole
    if scored.per_token:
        penalty = per_token
    return rollouts, penalised(scored, "kl", whole, penalty.view(scored.credit.shape))


def equal_for_equal(penalty: Tensor, rollouts: Rollouts) -> Tensor:
    """Returns the penalties (N, M), in which a completion takes the row of the first completion of its group that has
    the same tokens and nearly the same sum."""
    by_problem = rollouts.by_problem
    target = by_problem(rollouts.target)                                             # (P, G, M)
    same = equal_completions(target, by_problem(rollouts.mask))                      # (P, G, G)
    whole = by_problem(penalty.sum(1))                                               # (P, G)
    distance = (whole[:, :, None] - whole[:, None]).abs()                            # (P, G, G)
    same = same & (distance < ROUNDING)
    first = same.int().argmax(2)                                                     # (P, G)
    rows = first[..., None].expand(-1, -1, penalty.shape[1])                         # (P, G, M)
    return by_problem(penalty).gather(1, rows).view_as(penalty)


def penalised(scored: Scored, name: str, value: Tensor, penalty: Tensor) -> Scored:
    """Adds a penalty (P, G, 1 or M); value: (N,), logged as a reward of this name"""
    values = scored.values | {name: value}
    return replace(scored, penalty=scored.penalty + penalty, values=values)


def mask_truncated(rollouts: Rollouts, scored: Scored, rewards: Any) -> Shaped:
    """Removes completions that hit the token limit from the loss."""
    train_mask = rollouts.train_mask * ~rollouts.truncated[:, None]
    return replace(rollouts, train_mask=train_mask), scored


def drop_equal(rollouts: Rollouts, scored: Scored) -> Shaped:
    """Keeps only the groups with different rewards, because equal rewards teach nothing."""
    useful = scored.differ().cpu().nonzero().squeeze(1)                              # (p,)
    rollouts, _ = rollouts.select(useful)
    return rollouts, scored.select(useful)


def resample_equal(rollouts: Rollouts, scored: Scored, collect: Callable, dist: Distributed,
                   sums: Sums) -> Shaped:
    """Replaces groups of equal rewards with other problems, in at most MOST_RESAMPLES rounds (dynamic sampling, arXiv
    2503.14476 section 3.2).

    collect: (again, count) -> rollouts and Scored of `count` problems of another round
    """
    wanted = rollouts.problems
    resampled = 0
    rollouts, scored = drop_equal(rollouts, scored)
    for again in range(1, MOST_RESAMPLES + 1):
        missing = wanted - rollouts.problems
        if not dist.agree(missing):  # no rank misses a group
            break
        if missing:
            resampled += missing
            more_rollouts, more_scored = collect(again, missing)
            more_rollouts, more_scored = drop_equal(more_rollouts, more_scored)
            rollouts = join([rollouts, more_rollouts])
            scored = join([scored, more_scored])
    sums.mean("resampled", resampled, wanted)
    return rollouts, scored
