"""Distributions over tokens: truncation, drawing, logits in parts, and extreme logits at extreme settings."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import distributions
from core.distributions import (
    BLOCK, KeptTokens, draw_uniforms, entropy, in_parts, kept_tokens, nucleus, restrict, sample_from, sample_tokens,
    sampling_logp, token_logp)
from core.huggingface.model import BANNED
from tests.pretend_mps import PretendMps

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
@pytest.mark.parametrize("block", [None, 128, 4, 3, 1])
def test_tokens_are_drawn_as_by_a_loop_over_running_sums(zeros, total, block, monkeypatch):
    """block: tokens in a block of a vocabulary that counts as large"""
    if block:
        monkeypatch.setattr(distributions, "LARGE_VOCABULARY", 2)
        monkeypatch.setattr(distributions, "BLOCK", block)
    p = np.random.default_rng(len(zeros)).dirichlet(np.ones(6))
    p[list(zeros)] = 0.0
    logp = torch.from_numpy(p * total / p.sum()).log()                               # (6,)
    sums = np.cumsum(logp.exp().numpy()) / logp.exp().numpy().sum()
    edges = np.clip([sums - 1e-9, sums + 1e-9], 0, JUST_BELOW_ONE).flatten()
    noise = [0.0, JUST_BELOW_ONE, 1 - 1e-9, 5e-324, *edges, *np.random.default_rng(1).random(200)]
    drawn = sample_from(logp.expand(len(noise), 6), torch.tensor(noise, dtype=torch.float64)[:, None])[:, 0].tolist()
    assert drawn == [drawn_by_a_loop(logp.exp().tolist(), u) for u in noise]


def by_one_running_sum(logp, uniform):
    """The tokens of one running sum in float64, and the distance of the noise to the nearest step of that sum."""
    sums = logp.double().exp().cumsum(1)                                             # (K, V)
    sums /= sums[:, -1:].clone()
    ids = torch.searchsorted(sums, uniform, right=True)                              # (K, G)
    around = torch.stack((ids - 1, ids)).clamp(0, logp.shape[1] - 1)                 # (2, K, G)
    return ids, torch.stack([(sums.gather(1, i) - uniform).abs() for i in around]).amin(0)


@pytest.mark.parametrize("vocabulary", [16383, 16384, 16385, 20000])
def test_a_large_vocabulary_is_drawn_by_blocks_as_by_one_running_sum_and_never_what_has_no_probability(vocabulary):
    """Where the noise is near a step of the running sum, blocks may give its neighbour. The first is not large."""
    rng = np.random.default_rng(vocabulary)
    p = rng.dirichlet(np.full(vocabulary, 0.02), 6)                                  # a few likely tokens
    p[3:] = rng.dirichlet(np.ones(vocabulary), 3)                                    # none
    p[2, rng.random(vocabulary) < 0.9] = 0
    edges = np.arange(0, vocabulary, BLOCK)
    p[4, edges] = p[4, edges[1:] - 1] = p[4, -1] = 0                                 # at both ends of each block
    p[5, : BLOCK * 60].reshape(60, BLOCK)[::2] = 0                                   # in every second block
    logp = torch.from_numpy(p / p.sum(1, keepdims=True)).float().log()               # (6, V)
    sums = logp.double().exp().cumsum(1)
    steps = (sums / sums[:, -1:])[:, BLOCK - 1 :: BLOCK][:, :60]                     # (6, 60) between two blocks
    noise = torch.from_numpy(rng.random((6, 300)))
    noise = torch.cat((noise, steps, torch.tensor([[0.0, 5e-324, JUST_BELOW_ONE]]).double().expand(6, 3)), 1)
    ids = sample_from(logp, noise.clamp(max=JUST_BELOW_ONE))
    assert (logp.gather(1, ids) > -torch.inf).all()
    expected, distance = by_one_running_sum(logp, noise)
    is_clear = distance > (1e-6 if vocabulary >= 2**14 else 1e-14)
    assert torch.equal(ids[is_clear], expected[is_clear]) and is_clear[:3].float().mean() > 0.5


def test_noise_between_two_blocks_never_draws_what_has_no_probability():
    """The second block is as unlikely as the rounding of the sums."""
    p = torch.zeros(200, 20_000)
    p[:, 7] = torch.linspace(0.5, 1, 200)
    p[:, BLOCK + 9] = torch.linspace(1, 20, 200) * 2**-53
    noise = 1 - torch.arange(1, 60).double() * 2**-53
    logp = p.log()
    ids = sample_from(logp, noise.expand(200, 59))
    assert (logp.gather(1, ids) > -torch.inf).all() and set(ids.flatten().tolist()) == {7, BLOCK + 9}


def test_a_token_of_a_large_vocabulary_is_as_frequent_as_it_is_likely():
    p = np.random.default_rng(1).dirichlet(np.full(20_000, 0.001))
    draws = 50_000
    ids = sample_from(torch.from_numpy(p).float().log()[None], draw_uniforms(5, 0, [0], (draws,)))[0]
    likely = draws * p > 10
    counts, expected = np.bincount(ids, minlength=20_000), draws * p
    counts, expected = (np.append(x[likely], x[~likely].sum()) for x in (counts, expected))
    tokens = len(counts)
    deviation = ((counts - expected) ** 2 / expected).sum()
    assert tokens > 20 and deviation < tokens + 4 * math.sqrt(2 * tokens)


class Sizes(TorchDispatchMode):
    """Notes the most numbers in a tensor that an operation makes, by type."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.most[x.dtype] = max(self.most.get(x.dtype, 0), x.numel())
        return out

    def __enter__(self):
        self.most = {}
        return super().__enter__()


def test_of_a_large_vocabulary_only_sums_of_blocks_and_the_drawn_blocks_are_in_float64():
    logp = torch.randn(2, 152_000).log_softmax(-1)
    with Sizes() as sizes:
        sample_from(logp, NOISE.expand(2, 5))
    assert sizes.most[torch.float64] <= logp.numel() / 50


def test_on_an_apple_gpu_only_sums_of_blocks_and_the_drawn_blocks_go_to_the_cpu(monkeypatch):
    logits, moves = torch.randn(3, 20_000), []
    expected = sample_tokens(logits, NOISE.expand(3, 5))
    moved = PretendMps.moved
    monkeypatch.setattr(PretendMps, "moved", lambda gpu, x, *a, **s: moves.append(x.numel()) or moved(gpu, x, *a, **s))
    with PretendMps():
        ids, logp, _ = sample_tokens(logits.to("mps"), NOISE.expand(3, 5))
        assert ids.device.type == logp.device.type == "mps"
    assert torch.equal(ids, expected[0]) and torch.equal(logp, expected[1])
    assert max(moves[1:]) < logits.numel() / 10


def test_the_likeliest_token_is_the_first_of_equals_whatever_else_is_set():
    logits = torch.randint(3, (200, 30)).float()
    for more in {}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 0.2}:
        ids, logp, kept = sample_tokens(logits, NOISE.expand(200, 5), top_k=1, **more)
        assert kept is None and not logp.any()
        assert ids.tolist() == [[row.index(max(row))] * 5 for row in logits.tolist()]


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


@pytest.mark.parametrize("truncation", [
    {"top_p": 0.1}, {"top_p": 0.5}, {"top_p": 0.97}, {"top_k": 3}, {"min_p": 0.6},
    {"top_p": 0.9, "top_k": 4, "min_p": 0.01}], ids=str)
def test_in_the_top_part_all_kept_tokens_are_found_and_drawn_or_none(truncation, monkeypatch):
    enlarge(monkeypatch, 12, 5)
    weights = torch.rand(400, 20) + 1
    weights[:100] = torch.randint(1, 5, (100, 20)).float()
    weights[:50, 3] = weights[100:200, 4] = 4000.0
    logits = weights.log()
    ids, logp, kept = sample_tokens(logits, NOISE.expand(400, 5), **truncation, in_part=True)
    found = kept.any(1)
    whole_ids, whole_logp, whole = sample_tokens(logits, NOISE.expand(400, 5), **truncation)
    assert found.any() and (whole.sum(1) < 5)[found].all() and (not found.all() or truncation.get("top_k") == 3)
    is_tie = (logits == logits.topk(truncation.get("top_k", 1)).values[:, -1:]).sum(1) > 1  # topk takes any of them
    found &= ~is_tie if "top_k" in truncation else True
    assert torch.equal(kept[found], whole[found]) and torch.equal(ids[found], whole_ids[found])
    torch.testing.assert_close(logp[found], whole_logp[found])
    assert logp[~kept.any(1)].isnan().all() and 0 <= ids.min() and ids.max() < 20


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
        if truncation.get("top_k") == 1:
            assert kept is None
            kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
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
