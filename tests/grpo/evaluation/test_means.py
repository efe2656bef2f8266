"""Means over all completions of an evaluation."""

import math

import pytest
import torch

from grpo.evaluation.means import means_of, reward_sums


def test_a_mean_is_over_the_completions_of_all_batches_that_were_scored():
    sums = []
    for values in ([1.0, math.nan, 0.5], [math.nan, 3.0, math.nan]):
        sums.append(reward_sums({"a": torch.tensor(values), "b": torch.tensor([math.nan] * 3)}))
    assert means_of(sums, [{}]) == {"reward/a": 1.5}, "one that was never scored is left out"


def test_a_logged_metric_has_its_own_name_and_never_that_of_another():
    assert means_of([{"entropy": (1.0, 2)}], [{}, {"mine": (5.0, 1)}]) == {"entropy": 0.5, "mine": 5.0}
    with pytest.raises(ValueError, match=r"log_metric\('kl', ...\): the held-out metrics have one of this name"):
        means_of([{"kl": (0.1, 1)}], [{"kl": (3.0, 2)}])
