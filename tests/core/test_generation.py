"""Causal sampling: what is reported, when rows end, and that nothing depends on how rows are batched."""

import pytest
import torch

from core import distributions, generation
from core.distributions import KeptBudget, draw_uniforms, kept_tokens, restrict, sampling_logp
from core.generation import Stop, generate, join_generations
from tests.tiny import CAUSAL, causal_model, count_rows

never = lambda written, first: torch.zeros_like(written[:, first:], dtype=torch.bool)
early = lambda written, first: written[:, first:] >= 72  # about a quarter of the vocabulary ends a row
ends_with = lambda stop, rows: stop(torch.tensor(rows), len(rows[0]) - 1)[:, 0].tolist()


def padded(prompts):
    """(ids, padding) of prompts of unequal length."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[CAUSAL.pad_token_id] * (longest - len(p)) + p for p in prompts])
    return ids, torch.tensor([longest - len(p) for p in prompts])


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.8}])
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_generated_tokens_are_as_frequent_as_their_reported_probability(truncation, temperature):
    net, prompt, n = causal_model(scale=4.0), torch.tensor([[5, 6, 7], [9, 9, 8]]), 4000
    out = generate(net, prompt, None, torch.rand(2, n, 2, dtype=torch.float64), never, temperature, **truncation)
    for i in range(2):
        first, logp = out.target[i * n : (i + 1) * n, 0], out.logp[i * n : (i + 1) * n, 0]
        values, counts = first.unique(return_counts=True)
        expected = torch.stack([logp[first == v][0].exp() for v in values]) * n
        assert abs(float(expected.sum()) / n - 1) < 0.02, "what was never drawn is rare"
        chi2 = ((counts - expected) ** 2 / expected)[expected > 5].sum()
        dof = int((expected > 5).sum())
        assert chi2 < dof + 5 * (2 * dof) ** 0.5 + 5
        v = int(values[counts.argmax()])  # the second token, given the most frequent first one
        rows = (first == v).nonzero().squeeze(1)
        second, p = out.target[i * n : (i + 1) * n, 1][rows], out.logp[i * n : (i + 1) * n, 1][rows].exp()
        top = int(second.mode().values)
        share, p = float((second == top).float().mean()), float(p[second == top][0])
        assert abs(share - p) < 5 * (p * (1 - p) / len(rows)) ** 0.5 + 1e-3


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_p": 0.8, "large": True}])
def test_a_rollout_does_not_depend_on_the_batch_that_it_is_in(truncation, monkeypatch):
    if truncation.pop("large", False):  # its nucleus lies in the top part in some rows, and not in others
        for name, value in {"LARGE_VOCABULARY": 64, "TOP_PART": 8, "FEW": 0.2}.items():
            monkeypatch.setattr(distributions, name, value)
    net, stop = causal_model(), Stop(CAUSAL)
    prompts = [CAUSAL.encode(text) for text in ("the quick", "a", "brown fox jumps", "owls")]
    longest, G, L = max(map(len, prompts)), 5, 12

    def run(rows):
        ids = torch.tensor([[CAUSAL.pad_token_id] * (longest - len(prompts[i])) + prompts[i] for i in rows])
        padding = torch.tensor([longest - len(prompts[i]) for i in rows])
        return generate(net, ids, padding, draw_uniforms(3, 7, rows, (G, L)), stop, temperature=1.3, **truncation)

    together = run([0, 1, 2, 3])
    for i in range(4):
        alone = run([i])
        for g in range(G):
            n = int(alone.mask[g].sum())
            assert int(together.mask[i * G + g].sum()) == n
            assert torch.equal(alone.target[g, :n], together.target[i * G + g, :n])


def test_finished_rows_leave_the_batch_and_keep_what_they_wrote():
    net = causal_model(scale=1.0)
    seen = count_rows(net)
    out = generate(net, torch.tensor([[1, 2]]), None, torch.rand(1, 64, 20, dtype=torch.float64), early)
    assert seen[0] == 1, "one prefill per distinct prompt"
    assert seen[1] > 32 > seen[-1] and seen[1:] == sorted(seen[1:], reverse=True)
    length = out.mask.sum(1).long()
    for row, n in zip(out.target.tolist(), length.tolist(), strict=True):
        assert (row[n - 1] >= 72 or n == 20) and all(t < 72 for t in row[: n - 1]) and not any(row[n:])
    assert torch.equal(out.truncated, torch.tensor([row[n - 1] < 72 for row, n in
                                                    zip(out.target.tolist(), length.tolist(), strict=True)]))


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}])
def test_the_completions_do_not_depend_on_how_often_finished_rows_are_looked_for(truncation):
    prompt, padding = padded([CAUSAL.encode(text) for text in ("the quick", "a", "fox")])
    noise, found = draw_uniforms(3, 7, range(3), (16, 20)), {}
    for check_every in (None, 1, 3, 8, 100):
        net = causal_model(scale=1.0)
        seen = count_rows(net)
        out = generate(net, prompt, padding, noise, early, check_every=check_every, **truncation)
        found[check_every] = out
        assert seen[0] == 3 and seen[1:] == sorted(seen[1:], reverse=True)
        every = check_every or 1
        for t in range(1, len(seen) - 1):
            assert seen[t + 1] == seen[t] or (t + 1) % every == 0, "rows leave when they are looked for"
        assert seen[-1] == 48 if every == 100 else seen[-1] < 24, "most rows have left in the end"
        assert len(seen) <= 20
    base = found[None]
    assert 1 < base.mask.sum(1).min() + 1 < base.target.shape[1] and base.truncated.sum() < 10
    for out in found.values():
        assert torch.equal(out.target, base.target) and torch.equal(out.mask, base.mask)
        assert torch.equal(out.truncated, base.truncated)
        torch.testing.assert_close(out.logp, base.logp, rtol=1e-4, atol=1e-4)
        assert truncation == {} and out.kept is None or torch.equal(out.kept.dense(97), base.kept.dense(97))


@pytest.mark.parametrize("check_every", [1, 3])
@torch.no_grad()
def test_kept_tokens_are_listed_in_the_order_of_the_written_tokens(check_every):
    net, prompts = causal_model(), [CAUSAL.encode(text) for text in ("the quick", "a")]
    prompt, padding = padded(prompts)
    out = generate(net, prompt, padding, draw_uniforms(5, 1, range(2), (6, 10)), early, 1.2, top_p=0.95, min_p=0.02,
                   check_every=check_every)
    length = out.mask.sum(1).long().tolist()
    assert len(set(length)) > 2 and len(out.kept) == sum(length)
    dense, k = out.kept.dense(CAUSAL.base_vocab_size), 0
    for n, row in enumerate(out.target.tolist()):
        for t in range(length[n]):
            full = sampling_logp(net(torch.tensor([prompts[n // 6] + row[:t]]))[0, -1], 1.2)
            assert torch.equal(dense[k], kept_tokens(full, top_p=0.95, min_p=0.02)), (n, t)
            assert float(restrict(full, dense[k])[row[t]]) == pytest.approx(float(out.logp[n, t]), abs=1e-4)
            k += 1


@pytest.mark.parametrize("truncation", [{}, {"top_k": 4}])
def test_joined_generations_are_those_of_their_parts(truncation):
    net, prompts = causal_model(scale=2.0), torch.randint(0, 90, (4, 3))
    noise = draw_uniforms(1, 0, range(4), (3, 9))
    parts = [generate(net, prompts[i : i + 2], None, noise[i : i + 2], early, **truncation) for i in (0, 2)]
    short = generate(net, prompts[:1], None, noise[:1, :, :1], early, **truncation)
    joined, K = join_generations([*parts, short]), 0
    rows = 0
    for part in (*parts, short):
        N, M = part.target.shape
        for name in ("target", "mask", "logp"):
            x = getattr(joined, name)[rows : rows + N]
            assert torch.equal(x[:, :M], getattr(part, name)) and not x[:, M:].any()
        assert torch.equal(joined.truncated[rows : rows + N], part.truncated)
        if truncation:
            assert torch.equal(joined.kept.dense(97)[K : K + len(part.kept)], part.kept.dense(97))
            K += len(part.kept)
        rows += N
    assert rows == len(joined.target) and (K == len(joined.kept) if truncation else joined.kept is None)


def test_stop_sequences_end_a_row_and_are_cut_from_its_text():
    stop = Stop(CAUSAL, ["END", ";"])
    rows = [CAUSAL.encode(text) for text in ("abcEND", "abcdEN", "abcde;")]
    assert ends_with(stop, rows) == [True, False, True]
    assert [stop.text(row) for row in rows] == ["abc", "abcdEN", "abcde"]
    assert Stop(CAUSAL).text([*CAUSAL.encode("ab"), CAUSAL.stop_token_id]) == "ab"


def test_the_stop_token_ends_a_row_and_the_prefix_is_part_of_its_text():
    stop = Stop(CAUSAL, prefix="so ")
    rows = [[1, 2, CAUSAL.stop_token_id], [1, CAUSAL.stop_token_id, 3]]
    assert ends_with(stop, rows) == [True, False], "it has just ended, or not"
    assert stop.text(CAUSAL.encode("ab")) == "so ab"
    with pytest.raises(ValueError, match="stop_sequences: 'é' is a text that the tokenizer cannot write"):
        Stop(CAUSAL, ["é"])


def test_temperature_zero_takes_the_likeliest():
    net, prompt = causal_model(), torch.tensor([[1, 2, 3]])
    out, tokens = generate(net, prompt, None, torch.zeros(1, 1, 8), never, temperature=0), prompt
    for _ in range(8):
        tokens = torch.cat((tokens, net(tokens)[:, -1:].argmax(-1)), 1)
    assert out.target[0].tolist() == tokens[0, 3:].tolist()


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}])
def test_logits_in_parts_write_the_same_tokens(truncation, monkeypatch):
    prompt, padding = padded([CAUSAL.encode(text) for text in ("the quick", "a", "fox")])
    found = []
    for at_once in (2**25, 500):
        monkeypatch.setattr(generation, "LOGITS_AT_ONCE", at_once)
        net, sizes = causal_model(scale=2.0), []
        project = net.project
        net.project = lambda h: sizes.append(len(h)) or project(h)
        found.append(generate(net, prompt, padding, draw_uniforms(3, 7, range(3), (5, 12)), early, **truncation))
    whole, parts = found
    assert max(sizes) <= 500 // CAUSAL.base_vocab_size and len(sizes) > 12
    assert torch.equal(parts.target, whole.target) and torch.equal(parts.mask, whole.mask)
    torch.testing.assert_close(parts.logp, whole.logp, rtol=1e-4, atol=1e-4)
    assert whole.kept is None if not truncation else torch.equal(parts.kept.dense(97), whole.kept.dense(97))


def test_kept_tokens_that_do_not_fit_end_a_generation_before_it_is_done():
    net, noise = causal_model(scale=0.1), torch.rand(2, 200, 60, dtype=torch.float64)
    calls = count_rows(net)
    with pytest.raises(ValueError, match="stored_megabytes=1 .*top_k=50"):
        generate(net, torch.tensor([[1, 2], [3, 4]]), None, noise, never, top_p=0.99, budget=KeptBudget(1))
    assert len(calls) * 400 * 4 * 97 < 2 * 2**20, "it stops where the limit is reached"
    generate(net, torch.tensor([[1, 2], [3, 4]]), None, noise, never, top_k=5, budget=KeptBudget(1))


class Ends:
    """A tokenizer of which only what ends a completion is asked, and the text of single letters."""
    stop_token_ids = (3, 26)

    def encode(self, text):
        return [ord(c) - 97 for c in text]

    def decode(self, ids, special="_"):
        return "".join(chr(97 + i) for i in ids if i not in self.stop_token_ids)


def test_any_of_several_stop_tokens_ends_a_row():
    stop = Stop(Ends())
    assert ends_with(stop, [[1, 3], [3, 1], [2, 26], [5, 6]]) == [True, False, True, False]
    assert stop.text([0, 1, 26]) == stop.text([0, 1, 3]) == stop.text([0, 1]) == "ab"
    assert ends_with(Stop(CAUSAL), [[1]]) == [False]
    out = generate(causal_model(scale=1.0), torch.tensor([[1, 2]]), None, torch.rand(1, 64, 20, dtype=torch.float64),
                   stop)
    ends = {int(row[n - 1]) for row, n in zip(out.target, out.mask.sum(1).long(), strict=True)} & {3, 26}
    assert ends == {3, 26} and not any(set(row[: n - 1]) & {3, 26} for row, n in zip(
        out.target.tolist(), out.mask.sum(1).long().tolist(), strict=True))


class Words(Ends):
    """A tokenizer that leaves out the space with which a text begins."""
    stop_token_ids, words, vocab_size = (), ("a", " a", " "), 3

    def encode(self, text):
        return [1, 0] if text == " aa" else [2]

    def decode(self, ids, special="_"):
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def test_a_stop_sequence_that_begins_with_a_space_is_found():
    stop = Stop(CAUSAL, [" aa"])
    stop.tokenizer = Words()
    assert ends_with(stop, [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]) == [True, False]


def test_a_stop_sequence_that_can_be_written_in_mid_text_alone_is_accepted():
    """Metaspace, as SentencePiece models have it, puts a space before a text and leaves it out again."""
    t = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from core.huggingface.tokenizer import HuggingFaceTokenizer
    words = ["?", "</s>", "\u2581", "\u2581a", "a", "\u2581fox", "f", "o", "x"]
    backend = t.Tokenizer(t.models.Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.pre_tokenizer, backend.decoder = t.pre_tokenizers.Metaspace(), t.decoders.Metaspace()
    tokenizer = HuggingFaceTokenizer(transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="?"), "here")
    assert tokenizer.decode(tokenizer.encode(" fox")) == "fox"
    stop = Stop(tokenizer, [" fox"])
    rows = [tokenizer.encode(text)[-3:] for text in ("a a fox", "aaafox")]
    assert ends_with(stop, rows) == [True, False]
    with pytest.raises(ValueError, match="is a text that the tokenizer cannot write"):
        Stop(tokenizer, ["\n"])


class Counting:
    """A tokenizer that notes every text it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.decoded, self.stop_token_ids = tokenizer, [], tokenizer.stop_token_ids
        self.encode, self.vocab_size = tokenizer.encode, tokenizer.vocab_size

    def decode(self, ids, special="_"):
        self.decoded.append(list(ids))
        return self.tokenizer.decode(ids)


def test_a_row_is_decoded_only_when_its_newest_token_can_complete_a_stop_sequence():
    tokenizer = Counting(CAUSAL)
    stop = Stop(tokenizer, ["END", "x;"])
    text = torch.tensor([CAUSAL.encode("abcabcaENDa"), CAUSAL.encode("cbacbacbx;b")])
    for t in range(1, 4):
        stop(text[:, :t], t - 1)  # it has met a, b and c now
    tokenizer.decoded.clear()
    ends = torch.cat([stop(text[:, : t + 1], t) for t in range(3, 11)], 1)           # (2, 8)
    assert ends.nonzero().tolist() == [[0, 6], [1, 6]]
    alone = [ids for ids in tokenizer.decoded if len(ids) == 1]
    assert len(alone) == len({ids[0] for ids in alone}) == 5, "E, N, D, x and ; are looked at once each"
    tails = [CAUSAL.decode(ids)[-1] for ids in tokenizer.decoded if len(ids) > 1]
    assert sorted(tails) == sorted("ENDx;")


def test_where_a_row_ends_does_not_depend_on_how_many_columns_are_looked_at_together():
    text = torch.tensor([CAUSAL.encode("aENDa;aEND"), CAUSAL.encode("xEN;DENDab"), CAUSAL.encode("END;abcdef")])
    for k in (1, 2, 5, 10):
        stop = Stop(CAUSAL, ["END", ";"])
        ends = torch.cat([stop(text[:, : t + k], t) for t in range(0, 10, k)], 1)    # (3, 10)
        assert [row.index(True) for row in ends.tolist()] == [3, 3, 2], k


def test_a_sequence_is_found_where_its_last_character_is_written_in_parts():
    """Byte pairs: a token may hold a part of a character, and has no text of its own."""
    class Bytes:
        stop_token_ids, vocab_size = (), 256
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(ids).decode(errors="replace"))

    text = Bytes.encode("aé→b→")
    for sequence in ("→", "é→", "b→"):
        stop = Stop(Bytes, [sequence])
        ends = torch.cat([stop(torch.tensor([text[: t + 1]] * 2), t) for t in range(len(text))], 1)
        assert ends[0].tolist() == [Bytes.decode(text[: t + 1])[-len(sequence) :] == sequence or
                                    sequence in Bytes.decode(text[max(0, t + 1 - stop.window) : t + 1])
                                    for t in range(len(text))]
        assert ends.any()


@pytest.mark.parametrize("sequences", [["e"], ["o", "  "], ["the", "a", "X"]])
def test_stop_sequences_end_completions_alike_however_often_they_are_looked_for(sequences):
    prompt, padding = padded([CAUSAL.encode(text) for text in ("the quick", "a", "fox")])
    noise, found = draw_uniforms(3, 7, range(3), (16, 20)), []
    for check_every in (1, 3, 8, 100):
        stop = Stop(CAUSAL, sequences)
        found.append(generate(causal_model(scale=1.0), prompt, padding, noise, stop, check_every=check_every))
        for row, n in zip(found[-1].target.tolist(), found[-1].mask.sum(1).long().tolist(), strict=True):
            ends = [t for t in range(20) if any(s in CAUSAL.decode(row[: t + 1]) for s in sequences)
                    or row[t] == CAUSAL.stop_token_id]
            assert n == (ends[0] + 1 if ends and ends[0] < n else 20)
    assert found[0].truncated.sum() < 48 and len(set(found[0].mask.sum(1).tolist())) > 3
    for out in found[1:]:
        assert torch.equal(out.target, found[0].target) and torch.equal(out.mask, found[0].mask)
        assert torch.equal(out.truncated, found[0].truncated)


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}])
def test_shared_prompts_and_packed_weights_write_what_the_plain_way_writes(truncation, monkeypatch):
    prompt, padding = padded([CAUSAL.encode(text) for text in ("the quick", "a", "fox")])
    found = []
    for share_from, pack_from in ((10**9, 10**9), (0, 10**9), (0, 0)):
        monkeypatch.setattr("core.cache.SHARE_FROM", share_from)
        monkeypatch.setattr("core.performance.prepacked.PACK_FROM", pack_from)
        noise = draw_uniforms(3, 7, range(3), (16, 20))
        found.append(generate(causal_model(scale=2.0, n_layer=2), prompt, padding, noise, early, **truncation))
    for out in found[1:]:
        assert torch.equal(out.target, found[0].target) and torch.equal(out.mask, found[0].mask)
        torch.testing.assert_close(out.logp, found[0].logp, rtol=1e-4, atol=1e-4)
        assert truncation == {} or torch.equal(out.kept.dense(97), found[0].kept.dense(97))
