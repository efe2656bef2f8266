"""Causal sampling: the log-probabilities are those of the model, and nothing depends on how rows are batched."""

import pytest
import torch

from core.distributions import draw_uniforms, kept_tokens, restrict, sampling_logp
from core.generation import Stop, generate
from core.model import LANGUAGE_MODEL
from core.tokenizer import CharTokenizer
from tests.tiny import CAUSAL, causal_model, count_rows, counted, expect_frequencies, model

V = CAUSAL.base_vocab_size
NOISE = draw_uniforms(3, 7, range(3), (16, 20))
TRUNCATIONS = [{}, {"top_p": 0.95, "min_p": 0.02}, {"top_k": 5, "top_p": 0.8}]


def never(tokens, first):
    return torch.zeros_like(tokens[:, first:], dtype=torch.bool)


def early(tokens, first, turn=None):
    """About a quarter of the vocabulary ends a row."""
    return tokens[:, first:] >= 72


def padded(*texts):
    """(ids, padding) of prompts of unequal length."""
    prompts = [CAUSAL.encode(text) for text in texts]
    longest = max(map(len, prompts))
    ids = torch.tensor([[CAUSAL.pad_token_id] * (longest - len(p)) + p for p in prompts])
    return ids, torch.tensor([longest - len(p) for p in prompts])


PROMPTS = padded("the quick", "a", "fox")


def rows_of(out):
    """The sampled tokens of each completion, as lists."""
    return [row[:n] for row, n in zip(out.target.tolist(), out.mask.sum(1).long().tolist(), strict=True)]


def expect_same(out, expected, V=V):
    """Checks that two generations are the same, the log-probabilities up to rounding."""
    assert torch.equal(out.target, expected.target) and torch.equal(out.mask, expected.mask)
    assert torch.equal(out.truncated, expected.truncated)
    torch.testing.assert_close(out.logp, expected.logp, rtol=1e-4, atol=1e-4)
    assert out.kept is expected.kept is None or torch.equal(out.kept.dense(V), expected.kept.dense(V))


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}])
def test_a_completion_does_not_depend_on_the_batch_that_it_is_in(truncation, monkeypatch):
    monkeypatch.setattr("core.distributions.LARGE_VOCABULARY", 64)
    monkeypatch.setattr("core.distributions.TOP_PART", 8)  # some rows have their nucleus in it, and others do not
    net, (ids, padding), sizes = causal_model(), PROMPTS, []
    monkeypatch.setattr(net, "project", counted(net.project, sizes))
    sampling = {"temperature": 1.3} | truncation
    together, *alone = (generate(net, ids[rows], padding[rows], NOISE[rows], Stop(CAUSAL), **sampling)
                        for rows in ([0, 1, 2], [0], [1], [2]))
    assert rows_of(together) == [row for out in alone for row in rows_of(out)]
    assert max(sizes) == 48
    monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", 5 * V)
    sizes.clear()
    expect_same(generate(net, ids, padding, NOISE, Stop(CAUSAL), **sampling), together)
    assert max(sizes) == 5, "nor on the parts in which logits are computed"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
@torch.no_grad()
def test_frequencies_match_the_reported_log_probabilities(temperature, top_p):
    net, prompts = model(LANGUAGE_MODEL, scale=4.0, tokenizer=CharTokenizer("abcd")), torch.tensor([[0, 1], [3, 2]])
    noise = draw_uniforms(1, 0, [0, 1], (10_000, 2))
    out = generate(net, prompts, None, noise, never, temperature=temperature, top_p=top_p)
    token, logp = out.target.view(2, -1, 2), out.logp.view(2, -1, 2)
    for prompt, drawn, reported in zip(prompts, token, logp, strict=True):
        expect_frequencies(drawn[:, 0], reported[:, 0], net(prompt[None])[0, -1], temperature, top_p)
        for first in drawn[:, 0].unique():
            rows, text = drawn[:, 0] == first, torch.cat((prompt, first[None]))
            expect_frequencies(drawn[rows, 1], reported[rows, 1], net(text[None])[0, -1], temperature, top_p)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@torch.no_grad()
def test_finished_rows_leave_and_each_token_has_the_probability_and_the_kept_tokens_of_the_model(truncation):
    net = causal_model(scale=1.0)
    seen = count_rows(net)
    out = generate(net, *PROMPTS, NOISE, early, temperature=1.2, **truncation)
    assert seen[0] == 3, "one prefill per distinct prompt"
    assert seen[1] > 10 > seen[-1] and seen[1:] == sorted(seen[1:], reverse=True)
    rows = rows_of(out)
    assert all((row[-1] >= 72 or len(row) == 20) and all(t < 72 for t in row[:-1]) for row in rows)
    assert out.truncated.tolist() == [row[-1] < 72 for row in rows] and not out.target[out.mask == 0].any()
    assert len(set(map(len, rows))) > 2 and (not truncation or len(out.kept) == sum(map(len, rows)))
    kept = iter(out.kept.dense(V) if truncation else ())
    for n, row in enumerate(rows):
        prompt = PROMPTS[0][n // 16, PROMPTS[1][n // 16] :].tolist()
        logp = sampling_logp(net(torch.tensor([prompt + row]))[0, len(prompt) - 1 : -1], 1.2)  # (t, V)
        for t, token in enumerate(row):
            allowed = next(kept) if truncation else None
            assert not truncation or torch.equal(allowed, kept_tokens(logp[t], **truncation)), (n, t)
            assert float(restrict(logp[t], allowed)[token]) == pytest.approx(float(out.logp[n, t]), abs=1e-4)


@pytest.mark.parametrize("sequences", [["e"], ["the", "a", "X"], ["o", "  "]])
def test_stop_sequences_end_a_completion_where_its_text_first_contains_one(sequences):
    rows = rows_of(generate(causal_model(scale=1.0), *PROMPTS, NOISE, Stop(CAUSAL, sequences)))
    for row in rows:
        ends = [t for t in range(len(row)) if row[t] == CAUSAL.stop_token_id
                or any(s in CAUSAL.decode(row[: t + 1]) for s in sequences)]
        assert ends == [len(row) - 1] or (not ends and len(row) == 20)
    assert len(set(map(len, rows))) > 3


class Bytes:
    """A token is a byte: it may hold a part of a character, and has no text of its own."""
    stop_token_ids = ()
    encode = staticmethod(lambda text: list(text.encode()))
    decode = staticmethod(lambda ids: bytes(ids).decode(errors="replace"))


@pytest.mark.parametrize(("sequence", "text"), [("→", "aé→"), ("é→", "aé→"), ("b→", "aé→b→")])
def test_a_sequence_is_found_where_its_last_character_is_written_in_parts(sequence, text):
    ends = Stop(Bytes, [sequence])(torch.tensor([Bytes.encode("aé→b→")]), 0)[0].tolist()
    assert ends.index(True) == len(text.encode()) - 1, "what is marked after the first end means nothing"


def test_a_stop_sequence_does_not_begin_before_its_turn():
    for sequence, text in (("\n", "12\n+34\n-5\n"), ("aa", "xaaaaaaa"), ("ab", "ab+xab"), ("\n\n", "\n\n\n\nx\n\n")):
        ends = Stop(CAUSAL, (sequence,))(torch.tensor([CAUSAL.encode(text)]), 0)[0].tolist()
        assert ends == [text[: i + 1].endswith(sequence) for i in range(len(text))], text
    rows = torch.tensor([CAUSAL.encode("abENDx")] * 2)
    assert Stop(CAUSAL, ["END"])(rows, 4, [4, 0]).tolist() == [[False, False], [True, False]]
