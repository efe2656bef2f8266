"""Distributions over tokens: truncation, drawing, and logits in parts."""

import math

import numpy as np
import pytest
import torch

from core import distributions
from core.distributions import (KeptBudget, KeptCollector, KeptTokens, draw_uniforms, entropy, in_parts, kept_tokens,
                                nucleus, restrict, sample_from, sample_tokens, sampling_logp, token_logp, truncates)


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
    assert seen.count(torch.ops.aten.cumsum_) == 1
    assert not {torch.ops.aten.cumsum, torch.ops.aten.gt} & set(seen)


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


@pytest.fixture
def large(monkeypatch):
    """A vocabulary of 12 tokens counts as large."""
    for name, value in {"LARGE_VOCABULARY": 12, "TOP_PART": 5, "FEW": 0.5}.items():
        monkeypatch.setattr(distributions, name, value)


def nucleus_by_a_loop(p, top_p):
    """Tokens from the likeliest on, the first of equal ones first, until their probability reaches top_p."""
    chosen = []
    for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        chosen.append(i)
        if math.fsum(p[i] for i in chosen) >= top_p:
            break
    return [i in chosen for i in range(len(p))]


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.5, 0.7, 0.97])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_loop(large, top_p, monkeypatch):
    """Rows whose nucleus lies in the top part, reaches beyond it, or ends among tokens that are equally likely inside
    and outside of it."""
    weights = torch.randint(1, 5, (200, 20), generator=torch.Generator().manual_seed(1)).double()
    weights[:50, 3] = 40.0
    p = weights / weights.sum(-1, keepdim=True)
    sorted_rows, by_sorting = [], distributions.nucleus_of_all
    monkeypatch.setattr(distributions, "nucleus_of_all", lambda x, t: sorted_rows.append(len(x)) or by_sorting(x, t))
    found = nucleus(p.log().view(4, 50, 20), top_p).view(200, 20)
    p = p.log().exp()
    clear = [abs(math.fsum(sorted(row, reverse=True)[:k]) - top_p) > 1e-9 for row in p.tolist() for k in range(1, 21)]
    rows = [i for i in range(200) if all(clear[20 * i : 20 * i + 20])]
    assert len(rows) > 100, "the others reach top_p up to rounding"
    for i in rows:
        assert found[i].tolist() == nucleus_by_a_loop(p[i].tolist(), top_p), i
    assert sum(sorted_rows) < 200 if top_p <= 0.01 else 0 < sum(sorted_rows) <= 200


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.6}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8}])
def test_a_large_vocabulary_draws_the_tokens_of_a_small_one(truncation, scale, monkeypatch):
    logits = scale * torch.randn(30, 2, 40, generator=torch.Generator().manual_seed(5))
    uniform = draw_uniforms(0, 0, range(30), (7, 2))
    small = sample_tokens(logits, uniform, 0.8, **truncation)
    for few in (0.0, 0.3, 1.0):  # never among the kept alone, where they are few, always
        for name, value in {"LARGE_VOCABULARY": 40, "TOP_PART": 8, "FEW": few}.items():
            monkeypatch.setattr(distributions, name, value)
        target, logp, kept = sample_tokens(logits, uniform, 0.8, **truncation)
        assert torch.equal(target, small[0])
        torch.testing.assert_close(logp, small[1], rtol=1e-6, atol=1e-6)
        assert kept is None if small[2] is None else torch.equal(kept.dense(40), small[2].dense(40))


@pytest.mark.parametrize("V", [9, 12])
def test_drawn_tokens_and_their_probability_are_those_of_a_loop_over_the_kept_ones(large, V):
    """12 tokens count as a large vocabulary, 9 do not."""
    logits = 2 * torch.randn(6, 3, V, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    uniform = draw_uniforms(3, 0, range(6), (5, 3))
    target, logp, kept = sample_tokens(logits, uniform, 0.7, top_p=0.75)
    assert target.shape == logp.shape == (6, 5, 3) and len(kept) == 18
    p = (logits / 0.7).softmax(-1)
    for i in range(6):
        for m in range(3):
            allowed = nucleus_by_a_loop(p[i, m].tolist(), 0.75)
            assert kept.dense(V)[3 * i + m].tolist() == allowed
            q = [x * ok for x, ok in zip(p[i, m].tolist(), allowed, strict=True)]
            for g in range(5):
                token = drawn_by_a_loop(q, float(uniform[i, g, m]))
                assert int(target[i, g, m]) == token
                assert float(logp[i, g, m]) == pytest.approx(math.log(q[token] / sum(q)), abs=1e-9)


def test_temperature_zero_takes_the_likeliest_token():
    logits = torch.randn(4, 2, 9)
    target, logp, kept = sample_tokens(logits, torch.rand(4, 3, 2, dtype=torch.float64), 0)
    assert torch.equal(target, logits.argmax(-1)[:, None].expand(4, 3, 2)) and kept is None
    torch.testing.assert_close(logp, logits.log_softmax(-1).amax(-1)[:, None].expand(4, 3, 2))


def random_mask(K, V, seed=0):
    """(K, V) bool, with a row of none, a row of one and a row of all."""
    mask = torch.rand(K, V, generator=torch.Generator().manual_seed(seed)) < 0.4
    mask[0], mask[1], mask[2] = False, torch.arange(V) == V - 1, True
    return mask


def test_kept_tokens_hold_the_ids_of_a_mask_in_ascending_order():
    mask = random_mask(7, 11)
    kept = KeptTokens.of(mask)
    assert kept.ids.tolist() == [i for row in mask.tolist() for i, ok in enumerate(row) if ok]
    assert kept.counts.tolist() == [sum(row) for row in mask.tolist()]
    assert (kept.ids.dtype, kept.counts.dtype) == (torch.int32, torch.int64) and kept.most == 11
    assert torch.equal(kept.dense(11), mask) and len(kept) == 7 and kept.bytes == 4 * int(mask.sum()) + 8 * 7
    ids, there = kept.padded()
    for row, listed, ok in zip(mask, ids, there, strict=True):
        assert listed[ok].tolist() == row.nonzero().flatten().tolist() and not listed[~ok].any()
    assert torch.equal(KeptTokens.of(mask.view(7, 1, 11)).dense(11), mask)


@pytest.mark.parametrize("index", [[], [0], [3, 4, 5], [5, 3, 3, 0], [6, 5, 4, 3, 2, 1, 0], [0, 1, 5, 6, 2]])
def test_selected_split_and_joined_kept_tokens_are_the_rows_of_the_mask(index):
    mask = random_mask(7, 11)
    kept = KeptTokens.of(mask)
    index = torch.tensor(index, dtype=torch.long)
    part = kept[index]
    assert torch.equal(part.dense(11), mask[index]) and len(part) == len(index)
    assert part.ids.untyped_storage().nbytes() == part.ids.nbytes, "a copy: what was not chosen is let go"
    assert torch.equal(KeptTokens.join([kept, part, kept]).dense(11), torch.cat((mask, mask[index], mask)))
    for size in (1, 3, 7, 100):
        parts = kept.split(size)
        assert [len(x) for x in parts] == [len(x) for x in mask.split(size)]
        assert all(torch.equal(x.dense(11), y) for x, y in zip(parts, mask.split(size), strict=True))


def test_collected_kept_tokens_are_in_the_order_of_their_places():
    mask, place = random_mask(9, 6), torch.tensor([40, 3, 17, 8, 99, 0, 5, 21, 60])
    collector = KeptCollector()
    assert collector.joined() is None
    for rows in torch.arange(9).split(4):
        collector.add(place[rows], KeptTokens.of(mask[rows]))
    assert torch.equal(collector.joined().dense(6), mask[place.argsort()])


def test_kept_tokens_beyond_the_budget_are_refused_as_they_come():
    budget, kept = KeptBudget(1), KeptTokens.of(torch.ones(100, 1000, dtype=torch.bool))  # 0.38 MB
    collector = KeptCollector(budget)
    for _ in range(2):
        collector.add(torch.arange(100), kept)
    with pytest.raises(ValueError) as error:
        collector.add(torch.arange(100), kept)
    for part in ("stored_megabytes=1 ", "first 300 sampled tokens", "any of 1000 on average", "1.1 MB", "top_p=1.0",
                 "top_k=50", "batch_size", "raise stored_megabytes"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_parts_restricted_to_kept_tokens_equal_the_whole_forward_and_backward(monkeypatch):
    h = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 10, dtype=torch.float64, requires_grad=True)
    mask, target = random_mask(9, 10) | (torch.arange(10) == 3), torch.full((9,), 3)
    token_scores = lambda h, kept, target: (token_logp(restrict((h @ weight).log_softmax(-1), kept), target),)
    found = []
    for kept, at_once in ((mask, 2**25), (KeptTokens.of(mask), 2**25), (KeptTokens.of(mask), 20)):
        monkeypatch.setattr(distributions, "LOGITS_AT_ONCE", at_once)
        h.grad = weight.grad = None
        (logp,) = in_parts(token_scores, 10, h, kept, target)
        logp.square().sum().backward()
        found.append((logp.detach(), h.grad, weight.grad))
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        torch.testing.assert_close(other[1:], found[0][1:])


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
