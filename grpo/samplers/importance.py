"""Importance weights for rollouts of another process or of earlier weights, and a limit on how far they may be off.

With q the probability of a sampled token in the sampler and p its probability under the policy, before the first step
on it, the ratio of the token is p / q. grpo/step_metrics.py measures it.
"""

import math
from dataclasses import replace

import torch

from grpo.step_metrics import log_ratio

MOST_KL = 0.2        # nats per token: a sampler of other processes that is further away than this is not the policy's
TOKEN_CAP = 2.0      # largest weight of a token, as in Yao et al.: rounding and a few steps of training stay far below
SEQUENCE_CAP = 1.01  # of a completion's mean ratio: it rejects about 5% at max_staleness=1 (docs/results.md), 2 none


def check_mismatch(metrics, sampler):
    """Raises ValueError if rollouts of another process are further from the policy than any rounding or a few steps of
    training explain. sampler: the setting"""
    if metrics.get("mismatch_kl", 0.0) > MOST_KL:
        raise ValueError(f"sampler={sampler!r}: mismatch_kl={metrics['mismatch_kl']:.3g} nats per token is above "
                         f"{MOST_KL:g}: the sampler's log-probabilities are not those of the policy for the same "
                         "tokens; check its model, its temperature and the ids that it reports, and with max_staleness "
                         "above 0 lower learning_rate")


def truncated_ratios(d, mask):
    """The weight min(p / q, TOKEN_CAP) of every token.

    Truncated importance sampling: per token as in Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (fengyao.notion.site/off-policy-rl); the truncation from above is that of IMPALA, arXiv
    1802.01561 section 4.1, and of Ionides 2008. Small ratios keep their value.
    d: (N, M) log(p / q); mask: (N, M). Returns weights (N, M), and (N,) which completions stay: all
    """
    return d.clamp(max=math.log(TOKEN_CAP)).exp(), torch.ones_like(mask[:, 0])


def kept_sequences(d, mask):
    """The weight 1 of every token of a completion whose geometric mean of p / q is within [1 / SEQUENCE_CAP,
    SEQUENCE_CAP], and 0 of all tokens of the others.

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (richardli.xyz/rl-collapse), rollout_rs='seq_mean_k1' in verl, where caps of 1.0002 to 1.001 are usual: a mean over
    many tokens is far closer to 1 than a single ratio. A completion with a ratio that is not finite is rejected.
    d: (N, M) log(p / q); mask: (N, M). Returns weights (N, M), and (N,) which completions stay
    """
    mean = d.sum(1) / mask.sum(1).clamp(min=1)                                       # (N,)
    kept = (mean.abs() <= math.log(SEQUENCE_CAP)).to(mask.dtype)                     # (N,)
    return kept[:, None].expand_as(d), kept


IMPORTANCE = {"none": None, "token": truncated_ratios, "sequence_mask": kept_sequences}


def with_importance(rollouts, logp, importance):
    """The rollouts with importance weights, without a gradient, in their advantage, and the sums of their metrics.

    A loss is linear in a weight of its advantage that is not negative: min(r w A, clip(r) w A) = w min(r A, clip(r) A).
    So the advantage holds the weights, and the clipped ratio stays that to the policy before the step, as in decoupled
    PPO (arXiv 2110.00641). The KL penalty is not weighted. A rejected completion leaves mask and train_mask, and with
    them every denominator.
    logp: (N, M) log-probabilities under the policy before its first step; rollouts: with advantage, and with old_logp
    of the sampler; importance: the setting
    """
    d = log_ratio(logp, rollouts)                                                    # (N, M)
    mask = rollouts.train_mask                                                       # (N, M)
    weight, kept = IMPORTANCE[importance](d, mask)                                   # (N, M), (N,)
    capped = (d > math.log(TOKEN_CAP)) * mask                                        # (N, M)
    sums = {"importance_capped": (capped.sum(), mask.sum()),
            "importance_rejected": ((kept == 0).sum(), float(len(kept)))}
    rollouts = replace(rollouts, advantage=rollouts.advantage * weight, mask=rollouts.mask * kept[:, None],
                       train_mask=mask * kept[:, None])
    return rollouts, sums
