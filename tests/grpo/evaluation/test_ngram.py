"""The n-gram model, against counts in a dictionary."""

from collections import Counter

import numpy as np
import pytest

from grpo.evaluation import ngram
from grpo.evaluation.ngram import NGramModel


def probability(text, tokens, vocabulary, order):
    """p of the last token of `text`, from the formula of Witten and Bell, context by context."""
    if order == 0:
        return 1 / vocabulary
    context, x = tuple(text[-order:-1]), text[-1]
    after = Counter(tokens[i + order - 1] for i in range(len(tokens) - order + 1)
                    if tuple(tokens[i : i + order - 1]) == context)
    lower = probability(text, tokens, vocabulary, order - 1)
    if not after:
        return lower
    return (after[x] + len(after) * lower) / (sum(after.values()) + len(after))


@pytest.mark.parametrize("order", [1, 2, 4])
def test_bits_are_those_of_the_formula(order):
    rng = np.random.default_rng(order)
    tokens, text = rng.integers(0, 3, 60).tolist(), rng.integers(0, 5, (5, 8))  # token 4 never occurs in the counts
    tokens.append(3)  # a context that is never continued
    bits = NGramModel(tokens, 5, order).bits(text)
    for row, found in zip(text.tolist(), bits, strict=True):
        for t in range(len(row)):
            p = probability(row[: t + 1], tokens, 5, min(order, t + 1))
            assert found[t] == pytest.approx(-np.log2(p))


def test_near_are_the_tokens_whose_n_gram_has_a_masked_one():
    model = NGramModel([0, 1, 2, 0, 1, 1, 2, 0], 3, 3)
    text, mask = np.array([[0, 1, 2, 0, 1, 2]]), np.array([[0, 1, 0, 0, 0, 0]], dtype=bool)
    total, count = model.bits_near(text, mask)
    assert count == 3 and total == pytest.approx(model.bits(text)[0, 1:4].sum())


def test_at_most_so_many_tokens_are_counted(monkeypatch):
    monkeypatch.setattr(ngram, "MOST_TOKENS", 4)
    text = np.array([[0, 1, 2, 2]])
    assert (NGramModel([0, 1, 0, 1, 2, 2, 2], 3).bits(text) == NGramModel([0, 1, 0, 1], 3).bits(text)).all()
