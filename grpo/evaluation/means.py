"""Means over all completions of an evaluation, from the sums of its batches."""


def reward_sums(values):
    """{metric: (sum, count)} of rewards, over the completions that each scored.

    values: {name: (N,)}, NaN where a reward skipped the completion
    """
    return {f"reward/{name}": sum_and_count(x) for name, x in values.items()}


def sum_and_count(x):
    """(sum, count) of the values that are not NaN."""
    return x.nansum(), (~x.isnan()).sum()


def add_up(sums, more):
    """Adds {metric: (sum, count)} of another batch to `sums`."""
    for name, (total, count) in more.items():
        total_before, count_before = sums.get(name, (0.0, 0))
        sums[name] = (total_before + total, count_before + count)


def means_of(sums, logged):
    """{metric: mean} of what was counted, and of what rewards logged under their own names.

    sums, logged: {metric: (sum, count)}. Raises ValueError if a reward logs under the name of a held-out metric
    """
    means = {name: float(total / count) for name, (total, count) in sums.items() if count}
    for name, (total, count) in logged.items():
        if name in means:
            raise ValueError(f"log_metric({name!r}, ...): the held-out metrics have one of this name; give it another")
        means[name] = total / count
    return means
