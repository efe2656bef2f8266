"""Normalised rewards and weights for pass@k, against loops and enumeration."""

import math
from itertools import combinations, product

import numpy as np
import pytest
import torch

from grpo.shaping import normalised, pass_k_weight


def normalised_by_a_loop(group):
    """The definition, for one group, without the completions that were skipped."""
    seen = [x for x in group if not math.isnan(x)]
    mean = sum(seen) / len(seen) if seen else 0.0
    std = math.sqrt(sum((x - mean) ** 2 for x in seen) / (len(seen) - 1)) if len(seen) > 1 else 0.0
    return [(x - mean) / (std + 1e-4) for x in group]


def test_each_reward_is_normalised_within_its_group():
    rng = np.random.default_rng(0)
    tables = {"small": rng.normal(0, 0.01, (4, 6)), "large": rng.normal(50, 20, (4, 6))}
    tables["small"][1, 2:] = math.nan
    tables["large"][1, 4] = tables["small"][2, 1:] = math.nan
    tables["large"][3] = 7.0
    found = normalised({name: torch.tensor(table).float().flatten() for name, table in tables.items()}, 6)
    for name, table in tables.items():
        expected = [x for group in table.astype(np.float32).tolist() for x in normalised_by_a_loop(group)]
        assert found[name].tolist() == pytest.approx(expected, abs=2e-5, nan_ok=True)


@pytest.mark.parametrize("k", [1, 2, 4, 5])
def test_a_weight_is_k_times_the_share_of_sets_of_others_that_are_all_wrong(k):
    groups = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0] * 6,
              [1, None, 0, 0, 0, 0], [None, 1, 0, None, 0, 0], [None, 0, 0, None, 0, 0]]
    right = torch.tensor([[math.nan if x is None else float(x) for x in group] for group in groups])
    found = pass_k_weight(right, k)
    for i, group in enumerate(groups):
        for j in range(6):
            others = [x for x in (*group[:j], *group[j + 1 :]) if x is not None]
            sets = [not any(chosen) for chosen in combinations(others, k - 1)]
            expected = k * np.mean(sets) if sets else 1.0  # too few others to tell
            assert float(found[i, j]) == pytest.approx(expected, abs=1e-6), (group, j)


@pytest.mark.parametrize(("G", "k", "p", "known"), [
    (8, 2, 0.9, 0.2), (8, 4, 0.6, 0.256), (8, 1, 0.3, 1.0), (5, 5, 0.2, None), (2, 2, 0.7, None)])
def test_the_expected_update_is_the_gradient_of_pass_at_k(G, k, p, known):
    """All 2^G outcomes of a group of G completions, each right with probability p. The gradient of the log-probability
    of an outcome r by p is (r - p) / (p (1 - p)), and pass@k is 1 - (1 - p)^k."""
    outcomes = torch.tensor(list(product((0.0, 1.0), repeat=G)))                     # (2^G, G)
    r = outcomes.double()
    chance = p ** r.sum(1) * (1 - p) ** (1 - r).sum(1)                               # (2^G,)
    others = (r.sum(1, keepdim=True) - r) / (G - 1)
    update = (pass_k_weight(outcomes, k).double() * (r - others) * (r - p) / (p * (1 - p))).sum(1) / G
    gradient = k * (1 - p) ** (k - 1)
    assert float((chance * update).sum()) == pytest.approx(gradient, abs=1e-6)
    assert known is None or gradient == pytest.approx(known)
