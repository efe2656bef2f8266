"""Distributions over tokens: truncation, drawing, logits in parts, and extreme logits at extreme settings."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from core import distributions
from core.distributions import (
    KeptTokens, draw_uniforms, entropy, in_parts, kept_tokens, nucleus, restrict, sample_from, sample_tokens,
    sampling_logp, token_logp)
from core.huggingface.model import BANNED

JUST_BELOW_ONE = float(np.nextafter(1.0, 0.0))


def enlarge(monkeypatch, vocabulary, top_part):
    """A vocabulary counts as large from this many tokens on."""
    monkeypatch.setattr("core.distributions.LARGE_VOCABULARY", vocabulary)
    monkeypatch.setattr("core.distributions.TOP_PART", top_part)


def drawn_by_a_loop(p, u):
    """The first token at which the running sum of probabilities exceeds u times their total, in exact fractions."""
    possible = [i for i in range(len(p)) if p[i] > 0]
    return next((i for i in possible if math.fsum(p[: i + 1]) > u * math.fsum(p)), possible[-1])


def nucleus_by_a_loop(p, top_p):
    """Tokens from the likeliest on, the first of equal ones first, until their probability reaches top_p."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    size = next((k for k in range(1, len(p)) if math.fsum(p[i] for i in order[:k]) >= top_p), len(p))
    return [i in order[:size] for i in range(len(p))]


@pytest.mark.parametrize("total", [1.0, 1e-30])
@pytest.mark.parametrize("zeros", [(), (0, 1, 5), (0, 1, 2, 3, 4)])
def test_tokens_are_drawn_as_by_a_loop_over_running_sums(zeros, total):
    p = np.random.default_rng(len(zeros)).dirichlet(np.ones(6))
    p[list(zeros)] = 0.0
    logp = torch.from_numpy(p * total / p.sum()).log()                               # (6,)
    sums = np.cumsum(logp.exp().numpy()) / logp.exp().numpy().sum()
    edges = np.clip([sums - 1e-9, sums + 1e-9], 0, JUST_BELOW_ONE).flatten()
    noise = [0.0, JUST_BELOW_ONE, 1 - 1e-9, 5e-324, *edges, *np.random.default_rng(1).random(200)]
    drawn = sample_from(logp.expand(len(noise), 6), torch.tensor(noise, dtype=torch.float64)[:, None])[:, 0].tolist()
    assert drawn == [drawn_by_a_loop(logp.exp().tolist(), u) for u in noise]


def test_kept_tokens_are_the_top_k_then_the_nucleus_then_those_likely_enough():
    logp = torch.tensor([0.3, 0.4, 0.15, 0.1, 0.05]).log()
    for truncation, kept in (({"top_k": 2}, [0, 1]), ({"top_p": 0.75}, [0, 1, 2]), ({"top_p": 1e-9}, [1]),
                             ({"top_p": 0.4}, [1]), ({"min_p": 0.3}, [0, 1, 2]), ({"top_k": 3, "top_p": 0.8}, [0, 1]),
                             ({"top_k": 4, "min_p": 0.9}, [1]), ({}, [0, 1, 2, 3, 4]), ({"top_k": 9}, [0, 1, 2, 3, 4])):
        assert kept_tokens(logp[None], **truncation)[0].nonzero().flatten().tolist() == kept, truncation


def test_group_members_and_problems_have_noise_of_their_own():
    noise = draw_uniforms(1, 2, [0, 1], (3, 4))
    assert len(noise.flatten().unique()) == noise.numel()
    for seed, step in ((1, 3), (2, 2)):
        assert not torch.equal(noise, draw_uniforms(seed, step, [0, 1], (3, 4)))
    assert torch.equal(noise[1:], draw_uniforms(1, 2, [1], (3, 4))), "whatever other problems are drawn with it"


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.97])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_loop(top_p, monkeypatch):
    """Rows whose nucleus lies in the top part, reaches beyond it, or ends among tokens that are equally likely inside
    and outside of it."""
    enlarge(monkeypatch, 12, 5)
    weights = torch.randint(1, 5, (200, 20)).double()
    weights[:50, 3] = 40.0
    p = (weights / weights.sum(-1, keepdim=True)).log().exp()                        # as nucleus reads it
    checked = 0
    for row, kept in zip(p.tolist(), nucleus(p.log(), top_p).tolist(), strict=True):
        sums = np.cumsum(sorted(row, reverse=True))
        if abs(sums - top_p).min() > 1e-9:  # the others reach top_p up to rounding
            assert kept == nucleus_by_a_loop(row, top_p)
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("truncated", [False, True])
def test_logits_in_parts_equal_the_whole_forward_and_backward(truncated, monkeypatch):
    rows, kept, found = 23, None, []
    weight = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    h = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 10, (rows,))
    if truncated:
        kept = KeptTokens.of((torch.rand(rows, 10) < 0.7).scatter(1, target[:, None], True))
    for at_once in (2**25, 60, 5):  # 5 is less than the vocabulary
        sizes = []

        def function(h, kept, target):
            sizes.append(len(h))
            return (token_logp(restrict((h @ weight).log_softmax(-1), kept), target),)

        monkeypatch.setattr(distributions, "LOGITS_AT_ONCE", at_once)
        h.grad = weight.grad = None
        logp, = in_parts(function, 10, h, kept, target)
        logp.square().sum().backward()
        found.append((logp.detach(), h.grad, weight.grad))
        assert max(sizes) <= max(1, at_once // 10)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


EXTREMES = torch.tensor([BANNED, -1e4, -1.0, 0.0, 1e-30, 1.0, 1e4])
NOISE = torch.tensor([0.0, 5e-324, 0.3, 0.5, 1 - 1e-16], dtype=torch.float64)
TRUNCATIONS = [{}, {"top_p": 1e-12}, {"top_p": 0.5}, {"top_p": 1 - 1e-16}, {"top_k": 1}, {"top_k": 10**6},
               {"min_p": 1e-300}, {"min_p": 1 - 1e-9}, {"top_p": 0.95, "top_k": 2, "min_p": 1e-3}]


@pytest.fixture(params=["small", "large"])
def both_ways(request, monkeypatch):
    """Both ways to truncate: large means from two tokens on, of which one is looked for first."""
    if request.param == "large":
        enlarge(monkeypatch, 2, 1)


@pytest.mark.parametrize("temperature", [0.01, 1.0, 100.0])
def test_of_extreme_logits_what_is_drawn_is_possible_and_numbers_and_gradients_are_finite(both_ways, temperature):
    for V, truncation in product((2, 9), TRUNCATIONS):
        logits = EXTREMES[torch.randint(7, (100, V))].requires_grad_()
        ids, logp, kept = sample_tokens(logits.detach(), NOISE.expand(100, 5), temperature, **truncation)
        assert torch.isfinite(logp).all() and (logp <= 1e-6).all()
        if kept is not None:
            assert kept.gather(1, ids).all()
            assert (kept.sum(1) <= truncation.get("top_k", V)).all()
        whole = sampling_logp(logits, temperature)                                   # (100, V)
        scored = restrict(whole, kept)
        torch.testing.assert_close(scored.gather(1, ids), logp, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scored.exp().sum(1), torch.ones(100), rtol=1e-4, atol=1e-4)
        randomness = entropy(whole)
        assert (randomness > -1e-4).all() and (randomness < math.log(V) + 1e-4).all()
        (scored.gather(1, ids).sum() + randomness.sum()).backward()
        assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_logits_that_are_not_finite_raise_nothing_and_give_tokens_of_the_vocabulary(both_ways, bad, everywhere):
    for truncation in TRUNCATIONS:
        logits = EXTREMES[torch.randint(7, (50, 6))]
        logits[:, : 6 if everywhere else 1] = bad
        ids, logp, _ = sample_tokens(logits, NOISE.expand(50, 5), 1.0, **truncation)
        banned = bad == -math.inf and not everywhere
        assert ids.min() >= banned and ids.max() < 6, "minus infinity alone bans a token"
        assert (torch.isfinite(logp) == banned).all(), "a step with such a token is skipped"
