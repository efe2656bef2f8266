"""The judge as a reward: scores of texts of any length, and the credit of their tokens."""

from types import SimpleNamespace

import pytest
import torch

from core.judge import CHUNK
from grpo.reward_functions.judge import Judge
from tests.tiny import TOKENIZER, judge


def texts_of(*lengths, seed=0, places=1):
    """Random texts of these lengths, with places of sampled tokens in each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, TOKENIZER.base_vocab_size, (length,), generator=generator) for length in lengths]
    place = torch.stack([torch.randint(0, max(length, 1), (places,), generator=generator) for length in lengths])
    return SimpleNamespace(tokens=tokens, place=place)


def reader_of(dtype=torch.float32, **settings):
    """A Judge that reads token ids."""
    return Judge(judge(**settings), TOKENIZER, True, dtype)


def test_texts_of_any_length_are_scored_as_if_each_were_alone_by_their_ids_or_their_text():
    scorer, completions = judge(), ["the quick", "a", "the quick", "seven wise owls"]
    scores = Judge(scorer, TOKENIZER, False).scores(SimpleNamespace(prompts=["so "] * 4, completions=completions))
    ids = [torch.tensor(TOKENIZER.encode("so " + text)) for text in completions]
    for text, found in zip(ids, scores, strict=True):
        torch.testing.assert_close(found, scorer(text[None])[0].sigmoid().mean(), rtol=1e-4, atol=0)
    assert torch.equal(Judge(scorer, TOKENIZER, True).scores(SimpleNamespace(tokens=ids)), scores)


@pytest.mark.parametrize("head", ["realness", "cls"])
def test_equal_texts_are_read_once_and_have_equal_scores_to_the_last_bit(head):
    """A text at other places of a batch may get other last bits, and a group of equal texts would seem to differ."""
    reader, two, times = reader_of(torch.bfloat16, judge_head=head), texts_of(24, 24), CHUNK // 2 + 3
    texts, rows = SimpleNamespace(tokens=two.tokens * times, place=torch.arange(5).repeat(2 * times, 1)), []
    reader.model.register_forward_pre_hook(lambda model, args: rows.append(len(args[0])))
    scores = reader.scores(texts)
    assert sum(rows) == 2 and scores[0] != scores[1]
    assert torch.equal(scores, reader.scores(two).repeat(times))
    if head == "realness":
        again, credit = reader.score_and_credit(texts, 2)
        assert sum(rows) == 6 and torch.equal(again, scores)
        assert torch.equal(credit, credit[:2].repeat(times, 1))


def test_an_empty_text_is_one_pad_token():
    reader = reader_of()
    pad = reader.model(torch.tensor([[TOKENIZER.pad_token_id]])).sigmoid()[0, 0]
    torch.testing.assert_close(reader.scores(texts_of(4, 0))[1], pad)
    reader.reads_ids = False
    torch.testing.assert_close(reader.scores(SimpleNamespace(prompts=["", "a"], completions=["", "b"]))[0], pad)


@pytest.mark.parametrize(("head", "room"), [("realness", 33), ("cls", 32)])
def test_a_text_that_is_too_long_is_refused(head, room):
    reader = reader_of(judge_head=head)
    assert reader.scores(texts_of(room)).shape == (1,)
    with pytest.raises(ValueError, match="max_new_tokens"):
        reader.scores(texts_of(3, room + 1))


@pytest.mark.parametrize("lengths", [(20,) * 6, (20, 7, 20, 13, 7, 20)])
def test_credit_of_a_token_is_the_log_odds_near_it(lengths):
    reader, texts, window = reader_of(), texts_of(*lengths, places=5), 3
    texts.place[1, 4] = 30  # padding may lie behind a short text
    scores, credit = reader.score_and_credit(texts, window)
    assert credit.shape == (len(lengths), 5) and credit.isfinite().all()
    for n, text in enumerate(texts.tokens):
        odds = reader.model(text[None])[0].clamp(-6.9, 6.9)
        torch.testing.assert_close(scores[n], odds.sigmoid().mean(), rtol=1e-4, atol=1e-4)
        for m, t in enumerate(texts.place[n].clamp(max=len(text) - 1).tolist()):
            near = [float(odds[s]) for s in range(len(text)) if abs(s - t) <= window]
            assert float(credit[n, m]) == pytest.approx(sum(near) / len(near), rel=1e-2, abs=1e-2)
    everywhere = reader.score_and_credit(texts, max(lengths))[1]
    torch.testing.assert_close(everywhere, everywhere[:, :1].expand_as(everywhere))
