"""The metrics of a step, first as sums, which add up over micro-batches and ranks, and at the end as means."""

import torch

from core.training_step import NONFINITE
from grpo.samplers.mismatch import EXTREMES, mismatch_metrics

LOGGED = "logged by "          # begins the name of a sum of what rewards logged
OF_THE_TRAINER = ("step", "lr", "kl_beta", "bad_rollouts", "tokens_per_second")  # added to a record later; and time/...
DECIDING = ("loss", "log_prob", "advantage")  # a step in which one of these sums is not finite is skipped
MEANS = {  # name of a metric: (name of a sum, name of the sum that it is divided by)
    "mean_kl": ("kl", "trained_tokens"), "mean_reward": ("reward", "scored"),
    "std_reward": ("std_reward", "scored_problems"), "mean_advantage": ("advantage", "advantage_tokens"),
    "mean_log_prob": ("log_prob", "tokens"), "entropy": ("entropy", "trained_tokens"),
    "clip_fraction": ("clip_fraction", "trained_tokens"), "kl_to_old": ("kl_to_old", "trained_tokens"),
    "importance_capped": ("importance_capped", "importance_tokens"),
    "importance_rejected": ("importance_rejected", "importance_completions"),
    "frac_reward_zero_std": ("frac_reward_zero_std", "problems"), "resampled": ("resampled", "problems"),
    "unique_completions": ("unique_completions", "problems"), "success_prob": ("above", "scored"),
    "discriminative_score": ("ranked", "pairs"), "discriminative_margin": ("margin", "pairs")}
LARGEST = EXTREMES  # of these the largest over micro-batches and ranks counts; all others add up


def add_up(sums, more):
    """The sums of two parts of a step, with the names of the first."""
    added = {}
    for name, x in sums.items():
        if name in LARGEST:
            added[name] = torch.as_tensor(more[name]).clamp(min=x)
        else:
            added[name] = x + more[name]
    return added


def unique_completions(target, mask, G):
    """Number of distinct completions of each group of G. target, mask: (N, M). Returns (P,)."""
    x = ((target + 1) * mask.long()).view(-1, G, target.shape[1])                    # (P, G, M) 0 is padding alone
    same = (x[:, :, None] == x[:, None]).all(-1)                                     # (P, G, G)
    return (~same.tril(-1).any(-1)).sum(1)                                           # no earlier one is equal


def discriminative_sums(score, reward):
    """Sums that show how well the policy's log-probabilities separate better from worse completions of a group.

    score: (P, G) mean log-probability of the tokens of each completion; reward: (P, G), NaN where not scored
    Returns, over the pairs of completions of a group with different rewards: "pairs", their number; "ranked", in how
    many the better completion has the higher score (a tie counts half); "margin", the sum of its lead. And "above", the
    number of completions above the mean reward of their group. arXiv 2505.12366 describes group-relative objectives as
    discriminative in this sense.
    """
    better = reward[:, :, None] > reward[:, None]                                    # (P, G, G) False with a NaN
    lead = score[:, :, None] - score[:, None]                                        # (P, G, G)
    ranked = (lead > 0).float() + 0.5 * (lead == 0)                                  # (P, G, G)
    mean = reward.nanmean(1, keepdim=True)
    differs = better.flatten(1).any(1, keepdim=True)                                 # (P, 1) equal ones only round
    return {"pairs": better.sum(), "ranked": (ranked * better).sum(), "margin": (lead * better).sum(),
            "above": ((reward > mean) & differs).sum()}


def rollout_sums(rollouts, scored, differ, discriminative=False):
    """The metrics of rollouts before training on them, as sums.

    scored: a Scored (grpo/rewards.py); differ: (P,) bool, whether the rewards of a group differ
    """
    reward, mask, G = scored.reward, rollouts.mask, rollouts.group_size              # (P, G), (N, M)
    seen = ~reward.isnan()
    count = seen.sum(1).clamp(min=1)                                                 # (P,)
    mean = (reward.nansum(1) / count)[:, None]
    away = reward - mean                                                             # (P, G)
    unit = away.abs().nan_to_num().amax(1, keepdim=True).clamp(min=1.0)              # (P, 1) large squares overflow
    std = unit[:, 0] * ((away / unit).square().nansum(1) / (count - 1).clamp(min=1)).sqrt()
    sums = {"completions": float(reward.numel()), "problems": float(len(reward)), "scored": seen.sum(),
            "scored_problems": seen.any(1).sum(), "reward": reward.nansum(),
            "tokens": mask.sum(), "log_prob": (rollouts.old_logp * mask).sum(),
            "std_reward": std.sum(), "frac_reward_zero_std": (~differ).sum(),
            "unique_completions": unique_completions(rollouts.target, mask, G).sum(),
            "text_tokens": rollouts.texts.size}
    means = {f"reward/{name}": (x.nansum(), (~x.isnan()).sum()) for name, x in scored.values.items()}
    for name, (total, number) in (means | rollouts.texts.metrics).items():
        sums |= {f"sum of {name}": total, f"count of {name}": number}
    if discriminative:
        score = (rollouts.old_logp * mask).sum(1) / mask.sum(1).clamp(min=1)         # (N,)
        sums |= discriminative_sums(score.view_as(reward), reward)
    return sums


def nonfinite_rewards(scored, mask):
    """How many completions have a reward, or a credit of a sampled token, that is not a finite number. NaN in a Scored
    is none: there it means that the completion was skipped. mask: (N, M). Returns ()."""
    seen, credit = ~scored.reward.isnan(), ~scored.credit.isfinite()                 # (P, G), (P, G, 1 or M)
    if credit.shape[2] > 1:
        credit = credit & (mask.view_as(credit) > 0)
    bad = scored.reward.isinf() | credit.any(2) & seen                               # (P, G)
    for x in scored.values.values():
        bad = bad | x.view_as(bad).isinf()
    return bad.sum()


def logged_sums(metrics, names):
    """The sums of metrics {name: (sum, count)} that rewards logged, with those of these names that only others have."""
    sums = {}
    for name in names:
        total, number = metrics.get(name, (0.0, 0))
        sums |= {f"{LOGGED}sum of {name}": total, f"{LOGGED}count of {name}": number}
    return sums


def finish_metrics(totals):
    """The metrics of docs/metrics.md from the sums of a step over all micro-batches and ranks. A mean of nothing is
    left out."""
    as_they_are = ("loss", "pg_loss", "kl_penalty", "sampler/replaced_workers")
    metrics = {name: totals[name] for name in as_they_are if name in totals}
    for name, (key, count) in MEANS.items():
        if key in totals and totals[count]:
            metrics[name] = totals[key] / totals[count]
    metrics |= mismatch_metrics(totals)
    metrics |= named_means(totals, "")
    for name in ("text_tokens", "grad_norm", "skipped_steps", "empty_steps"):
        metrics[name] = totals[name]
    metrics["skipped_samples"] = totals["completions"] - totals["scored"]
    metrics |= {name: x for name, x in totals.items() if name.startswith(NONFINITE)}
    logged = named_means(totals, LOGGED)
    for name in logged:
        if name in metrics or name in OF_THE_TRAINER or name.startswith("time/"):
            raise ValueError(f"log_metric({name!r}, ...): training has a metric of this name; give it another")
    return metrics | logged


def named_means(totals, prefix):
    """{name: mean} of the entries "<prefix>sum of <name>" and "<prefix>count of <name>"."""
    means = {}
    for key, total in totals.items():
        if key.startswith(f"{prefix}sum of "):
            name = key.removeprefix(f"{prefix}sum of ")
            count = totals[f"{prefix}count of {name}"]
            if count:
                means[name] = total / count
    return means
