"""Distributions of extreme logits, at extreme settings: finite, and nothing is drawn that cannot be."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core import distributions
from core.distributions import entropy, kept_tokens, sample_tokens, sampling_logp, token_logp
from core.huggingface.model import BANNED

FEW_EXAMPLES = settings(derandomize=True, max_examples=60, deadline=None, database=None)
LOGITS = st.one_of(st.sampled_from([BANNED, -1e4, -1.0, 0.0, 1e-30, 1.0, 1e4]), st.floats(-1e4, 1e4, width=32))
ROWS = st.integers(2, 12).flatmap(lambda V: st.lists(st.lists(LOGITS, min_size=V, max_size=V), min_size=1, max_size=4))
TEMPERATURES = st.sampled_from([0.01, 0.1, 1.0, 7.0, 100.0])
TRUNCATIONS = st.fixed_dictionaries({
    "top_p": st.sampled_from([1e-12, 0.5, 0.95, 1 - 1e-7, 1 - 1e-16, 1.0]), "top_k": st.sampled_from([0, 1, 2, 10**6]),
    "min_p": st.sampled_from([0.0, 1e-300, 1e-3, 0.5, 1 - 1e-9])})
NOISE = st.sampled_from([0.0, 5e-324, 0.3, 0.5, 1 - 1e-16])
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])


@pytest.fixture(params=["small", "large"], autouse=True)
def vocabulary(request, monkeypatch):
    """Both ways to truncate: large means from two tokens on, of which one is looked for first."""
    if request.param == "large":
        for name, value in {"LARGE_VOCABULARY": 2, "TOP_PART": 1, "FEW": 1.0}.items():
            monkeypatch.setattr(distributions, name, value)
    return request.param


def drawn(rows, noise, temperature, truncation):
    """ids, logp, the logits, which tokens could be drawn: (P,), (P,), (P, V), (P, V)."""
    logits = torch.tensor(rows)                                                      # (P, V)
    uniform = torch.full((len(rows), 1, 1), noise, dtype=torch.float64)
    ids, logp, kept = sample_tokens(logits[:, None], uniform, temperature, **truncation)
    could = torch.ones_like(logits, dtype=torch.bool) if kept is None else kept.dense(logits.shape[1])
    return ids.flatten(), logp.flatten(), logits, could


@given(ROWS, NOISE, TEMPERATURES, TRUNCATIONS)
@FEW_EXAMPLES
def sampling_is_sound(rows, noise, temperature, truncation):
    ids, logp, logits, could = drawn(rows, noise, temperature, truncation)
    assert torch.isfinite(logp).all() and (logp <= 1e-6).all()
    assert could.gather(1, ids[:, None]).all() and could.any(1).all()
    if 0 < truncation["top_k"]:
        assert (could.sum(1) <= truncation["top_k"]).all()
    again = token_logp(sampling_logp(logits, temperature, **truncation), ids)
    torch.testing.assert_close(again, logp, rtol=1e-5, atol=1e-5)


def test_what_is_drawn_is_possible_and_its_probability_finite():
    sampling_is_sound()


@given(ROWS, TEMPERATURES, TRUNCATIONS)
@FEW_EXAMPLES
def gradients_are_finite(rows, temperature, truncation):
    logits = torch.tensor(rows, requires_grad=True)                                  # (P, V)
    logp = sampling_logp(logits, temperature, **truncation)
    likeliest = logp.detach().argmax(1)
    assert torch.isfinite(token_logp(logp, likeliest)).all()
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(len(rows)), rtol=1e-4, atol=1e-4)
    whole = sampling_logp(logits, temperature)
    assert torch.isfinite(whole).all()
    randomness = entropy(whole)
    assert (randomness > -1e-4).all() and (randomness < math.log(logits.shape[1]) + 1e-4).all()
    (token_logp(logp, likeliest) + randomness).sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_log_probabilities_entropy_and_gradients_are_finite():
    gradients_are_finite()


@given(ROWS, NOISE, TEMPERATURES, TRUNCATIONS, NOT_FINITE, st.booleans())
@FEW_EXAMPLES
def nothing_is_raised(rows, noise, temperature, truncation, bad, everywhere):
    rows = [[bad] * len(row) if everywhere else [bad, *row[1:]] for row in rows]
    ids, logp, logits, could = drawn(rows, noise, temperature, truncation)
    assert (0 <= ids).all() and (ids < logits.shape[1]).all() and could.any(1).all()
    if everywhere or bad != -math.inf:
        assert not torch.isfinite(logp).any(), "a step with such a token is skipped"
    else:
        assert torch.isfinite(logp).all() and (ids > 0).all(), "minus infinity alone bans a token"


def test_logits_that_are_not_finite_raise_nothing_and_give_tokens_of_the_vocabulary():
    nothing_is_raised()


@pytest.mark.parametrize("truncation", [{"min_p": 0.1}, {"top_p": 0.9}, {"top_k": 2}, {"top_p": 0.9, "min_p": 0.1}])
def test_of_logits_that_are_nan_few_tokens_are_kept(truncation):
    """All tokens of a large vocabulary would exceed the memory for kept ids, and end the run."""
    assert (kept_tokens(torch.full((3, 9), math.nan), **truncation).sum(1) <= 2).all()
