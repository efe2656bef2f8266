"""Distributions over tokens: truncation, drawing, and logits in parts."""

import math

import numpy as np
import pytest
import torch

from core import distributions
from core.distributions import (draw_uniforms, entropy, in_parts, kept_tokens, nucleus, restrict, sample_from,
                                sampling_logp, token_logp, truncates)


def drawn_by_a_loop(p, u):
    """The first token at which the running sum of probabilities exceeds u times their total, in exact fractions."""
    total = math.fsum(p)
    for i in range(len(p)):
        if p[i] > 0 and math.fsum(p[: i + 1]) > u * total:
            return i
    return max(i for i in range(len(p)) if p[i] > 0)


def test_the_edges_of_the_unit_interval_pick_possible_tokens():
    logp = torch.tensor([[[-torch.inf, 0.5, 0.25, 0.25, -torch.inf]]]).clamp(max=0.5)
    logp[0, 0, 1:4] = torch.tensor([0.5, 0.25, 0.25]).log()
    u = torch.tensor([[[0.0], [1 - 1e-16], [0.4999], [0.5001]]], dtype=torch.float64)
    assert sample_from(logp, u).flatten().tolist() == [1, 3, 1, 2]


JUST_BELOW_ONE = float(np.nextafter(1.0, 0.0))


@pytest.mark.parametrize("total", [1.0, 1 - 1e-7, 0.3, 1e-30])
@pytest.mark.parametrize("zeros", [(), (5,), (0,), (4, 5), (0, 1, 5), (1, 2, 3, 4, 5), (0, 1, 2, 3, 4)])
def test_tokens_are_drawn_as_by_a_loop_over_running_sums(zeros, total):
    p = np.random.default_rng(len(zeros)).dirichlet(np.ones(6))
    p[list(zeros)] = 0.0
    p *= total / p.sum()
    logp = torch.from_numpy(p).log()
    logp[p == 0] = -torch.inf
    sums = np.cumsum(logp.exp().numpy()) / logp.exp().numpy().sum()
    edges = [0.0, JUST_BELOW_ONE, 1 - 1e-9, 5e-324, *np.clip(sums - 1e-9, 0, JUST_BELOW_ONE),
             *np.clip(sums + 1e-9, 0, JUST_BELOW_ONE), *np.random.default_rng(1).random(200)]
    drawn = sample_from(logp[None, None], torch.tensor(edges, dtype=torch.float64)[None, :, None])[0, :, 0].tolist()
    assert drawn == [drawn_by_a_loop(logp.exp().tolist(), u) for u in edges]
    assert all(p[i] > 0 for i in drawn)


def test_no_noise_below_one_reaches_a_token_of_probability_zero():
    """The running sum ends anywhere around 1 by rounding; the last possible token is drawn, not the one behind it."""
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(400, 1, 50, generator=generator).log_softmax(-1)
    logp[:, :, -7:] = -torch.inf
    u = torch.full((400, 1, 1), JUST_BELOW_ONE, dtype=torch.float64)
    assert (sample_from(logp, u) == 42).all()
    # A token that is too rare for the sum to change is not reached either
    rare = torch.tensor([[[0.0, -100.0, -torch.inf]]])
    assert sample_from(rare, u[:1]).tolist() == [[[0]]]


def test_drawn_tokens_are_as_frequent_as_likely():
    logp = (2 * torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(2))).log_softmax(-1)
    logp[0, 0, 3], logp[1, 1, 7] = -torch.inf, -torch.inf
    draws = 50_000
    ids = sample_from(logp, torch.rand(3, draws, 2, dtype=torch.float64))
    assert ids.shape == (3, draws, 2) and ids.dtype == torch.int64
    for i in range(3):
        for m in range(2):
            p = logp[i, m].double().exp().numpy()
            p /= p.sum()
            counts = np.bincount(ids[i, :, m].numpy(), minlength=8)
            assert counts[p == 0].sum() == 0
            chi_square = ((counts - draws * p)[p > 0] ** 2 / (draws * p[p > 0])).sum()
            assert chi_square < 30  # 7 degrees of freedom: one in 10,000


def test_drawing_sums_up_the_vocabulary_once():
    """One cumulative sum is enough; a search for the last possible token would take a third of the time."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if torch.is_tensor(out) and out.shape[-1:] == (640,):
                seen.append(function.overloadpacket)
            return out

    logp, u = torch.randn(2, 3, 640).log_softmax(-1), torch.rand(2, 4, 3, dtype=torch.float64)
    with Watch():
        sample_from(logp, u)
    assert seen.count(torch.ops.aten.cumsum) == 1 and torch.ops.aten.gt not in seen


def test_nucleus_is_the_smallest_set_that_reaches_top_p():
    logp = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert nucleus(logp, 0.5).tolist() == [False, True, False, False]
    assert nucleus(logp, 0.76).tolist() == [False, True, True, True]
    assert nucleus(logp, 1e-9).tolist() == [False, True, False, False]


def test_kept_tokens_are_the_top_k_then_the_nucleus_then_those_likely_enough():
    logp = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()
    assert kept_tokens(logp, top_k=2).tolist() == [True, True, False, False, False]
    assert kept_tokens(logp, top_p=0.75).tolist() == [True, True, True, False, False]
    assert kept_tokens(logp, min_p=0.3).tolist() == [True, True, True, False, False]
    assert kept_tokens(logp, top_k=3, top_p=0.8).tolist() == [True, True, False, False, False]
    assert sampling_logp(logp, top_k=2).exp()[:2].tolist() == pytest.approx([4 / 7, 3 / 7])


@pytest.mark.parametrize("truncation", [(1.0, 0, 0.0), (0.9, 0, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.1), (0.9, 3, 0.1)])
def test_settings_truncate_exactly_if_they_exclude_a_token(truncation):
    logp = torch.tensor([0.5, 0.3, 0.1, 0.07, 0.03]).log()
    assert truncates(*truncation) == (not kept_tokens(logp, *truncation).all())


def test_a_restricted_distribution_is_that_of_a_loop():
    logp, kept = torch.randn(5, 7).log_softmax(-1), torch.rand(5, 7) < 0.5
    kept[:, 2] = True
    for row, allowed, found in zip(logp.exp().tolist(), kept.tolist(), restrict(logp, kept).tolist(), strict=True):
        total = sum(p for p, ok in zip(row, allowed, strict=True) if ok)
        for p, ok, value in zip(row, allowed, found, strict=True):
            assert value == (pytest.approx(math.log(p / total), abs=1e-5) if ok else -math.inf)
    assert restrict(logp, None) is logp


def test_entropy_against_a_loop():
    a = torch.randn(7).double().log_softmax(-1)
    assert abs(entropy(a) + sum(float(x.exp() * x) for x in a)) < 1e-12
    truncated = sampling_logp(torch.randn(3, 7), 0.7, 0.4)
    assert torch.isfinite(entropy(truncated)).all()


def test_token_logp_gathers():
    logp = torch.randn(2, 3, 5)
    target = torch.tensor([[0, 4, 2], [1, 1, 3]])
    assert token_logp(logp, target)[1, 2] == logp[1, 2, 3]


def test_group_members_and_problems_have_noise_of_their_own():
    noise = draw_uniforms(1, 2, [0, 1], (3, 4))
    assert len(noise.flatten().unique()) == noise.numel()
    assert not torch.equal(noise, draw_uniforms(1, 3, [0, 1], (3, 4)))
    assert not torch.equal(noise, draw_uniforms(2, 2, [0, 1], (3, 4)))
    assert torch.equal(noise[1:], draw_uniforms(1, 2, [1], (3, 4))), "whatever other problems are drawn with it"


@pytest.mark.parametrize("rows", [1, 5, 6, 7, 23])
@pytest.mark.parametrize("missing", [False, True])
def test_parts_equal_the_whole_forward_and_backward(rows, missing, monkeypatch):
    V, largest = 10, []
    weight = torch.randn(4, V, dtype=torch.float64, requires_grad=True)
    h = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    extra = None if missing else torch.rand(rows, V) < 0.7

    def function(h, extra, target):
        logits = h @ weight                                                          # (k, V)
        largest.append(logits.numel())
        assert (extra is None) == missing
        if extra is not None:
            logits = logits.masked_fill(~extra, -3.0)
        return token_logp(logits.log_softmax(-1), target), logits.argmax(-1)

    target = torch.randint(0, V, (rows,))
    whole, best = function(h, extra, target)
    whole.square().sum().backward()
    wanted = [x.grad.clone() for x in (h, weight)]
    h.grad = weight.grad = None
    largest.clear()
    monkeypatch.setattr(distributions, "LOGITS_AT_ONCE", 60)
    found, best_found = in_parts(function, V, h, extra, target)
    found.square().sum().backward()
    assert torch.equal(found, whole) and torch.equal(best_found, best)
    for a, b in zip((h.grad, weight.grad), wanted, strict=True):
        torch.testing.assert_close(a, b)
    parts = -(-rows // 6)
    assert max(largest) <= 60 and len(largest) == (1 if parts == 1 else 2 * parts), "again in the backward pass"


def test_a_vocabulary_larger_than_the_bound_goes_row_by_row(monkeypatch):
    monkeypatch.setattr(distributions, "LOGITS_AT_ONCE", 5)
    sizes = []
    (out,) = in_parts(lambda x: sizes.append(len(x)) or (x * 2,), 100, torch.arange(3.0))
    assert sizes == [1, 1, 1] and out.tolist() == [0, 2, 4]
