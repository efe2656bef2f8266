"""Means over all completions of an evaluation, from the sums of its batches."""

from grpo.rollout import join


def reward_sums(values):
    """{metric: (sum, count)} of rewards, over the completions that each scored.

    values: {name: (N,)}, NaN where a reward skipped the completion
    """
    return {f"reward/{name}": sum_and_count(x) for name, x in values.items()}


def sum_and_count(x):
    """(sum, count) of the values that are not NaN."""
    return x.nansum(), (~x.isnan()).sum()


def masked_sum(x, mask):
    """(sum, count) of x where the mask is 1.0; x, mask: of the same shape."""
    return (x * mask).sum(), mask.sum()


def means_of(sums, logged):
    """{metric: mean} of what was counted, and of what rewards logged under their own names.

    sums, logged: of each batch {metric: (sum, count)}. Raises ValueError if a reward logs under the name of a held-out
    metric
    """
    sums, logged = join(sums), join(logged)
    for name in logged:
        if name in sums:
            raise ValueError(f"log_metric({name!r}, ...): the held-out metrics have one of this name; give it another")
    return {name: float(total / count) for name, (total, count) in (sums | logged).items() if count}
