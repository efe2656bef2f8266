"""The judge as a reward: scores of texts of any length, and the credit of their tokens."""

from types import SimpleNamespace

import pytest
import torch

from core.judge import CHUNK
from grpo.reward_functions.judge import Judge
from tests.tiny import TOKENIZER, judge


def texts_of(*lengths, places=1):
    """Random texts of these lengths, with places of sampled tokens in each."""
    tokens = [torch.randint(0, TOKENIZER.base_vocab_size, (length,)) for length in lengths]
    place = torch.stack([torch.randint(0, max(length, 1), (places,)) for length in lengths])
    return SimpleNamespace(tokens=tokens, place=place)


def test_texts_of_any_length_are_scored_as_if_each_were_alone_by_their_ids_or_their_text():
    scorer, completions = judge(), ["the quick", "a", "the quick", "", "seven wise owls"]
    scores = Judge(scorer, TOKENIZER, False).scores(SimpleNamespace(prompts=[""] * 5, completions=completions))
    ids = [torch.tensor(TOKENIZER.encode(text), dtype=torch.long) for text in completions]
    assert torch.equal(Judge(scorer, TOKENIZER, True).scores(SimpleNamespace(tokens=ids)), scores)
    ids[3] = torch.tensor([TOKENIZER.pad_token_id])  # for an empty text
    for text, found in zip(ids, scores, strict=True):
        torch.testing.assert_close(found, scorer(text[None])[0].sigmoid().mean(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("head", ["realness", "cls"])
def test_equal_texts_are_read_once_and_have_equal_scores_to_the_last_bit(head):
    """A text at other places of a batch may get other last bits, and a group of equal texts would seem to differ."""
    reader, two = Judge(judge(judge_head=head), TOKENIZER, True, torch.bfloat16), texts_of(24, 24)
    times, rows = CHUNK // 2 + 3, []
    texts = SimpleNamespace(tokens=two.tokens * times, place=torch.arange(5).repeat(2 * times, 1))
    reader.model.register_forward_pre_hook(lambda model, args: rows.append(len(args[0])))
    scores = reader.scores(texts)
    assert sum(rows) == 2 and torch.equal(scores, reader.scores(two).repeat(times))
    if head == "realness":
        again, credit = reader.read(texts, 2)
        assert torch.equal(again, scores) and torch.equal(credit, credit[:2].repeat(times, 1))


def test_credit_of_a_token_is_the_log_odds_near_it():
    reader, texts, window = Judge(judge(), TOKENIZER, True), texts_of(*[20] * 6, places=5), 3
    scores, credit = reader.read(texts, window)
    assert credit.shape == (6, 5)
    for n, text in enumerate(texts.tokens):
        odds = reader.model(text[None])[0].clamp(-6.9, 6.9)
        torch.testing.assert_close(scores[n], odds.sigmoid().mean(), rtol=1e-4, atol=1e-4)
        for m, t in enumerate(texts.place[n].tolist()):
            near = [float(odds[s]) for s in range(len(text)) if abs(s - t) <= window]
            assert float(credit[n, m]) == pytest.approx(sum(near) / len(near), rel=1e-2, abs=1e-2)
