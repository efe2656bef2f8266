"""The judge: its score, the texts that it learns from, its report."""

import numpy as np
import pytest
import torch

from core.dataset_consumer import unpack_batch
from core.judge import (CHUNK, FilledText, auc, average_ranks, calculate_judge_scores, calculate_realness,
                        judge_report)
from tests.tiny import TOKENIZER, config, consumer, judge, model


def test_scores_are_mean_realness_or_one_minus_the_regressed_share():
    text = torch.randint(0, 96, (CHUNK + 5, 32))
    scorer = judge()
    scores = calculate_judge_scores(scorer, text, TOKENIZER.cls_token_id)
    assert scores.shape == (CHUNK + 5,) and ((scores > 0) & (scores < 1)).all()
    torch.testing.assert_close(scores[-1], scorer(text[-1:]).sigmoid().mean())
    realness = calculate_realness(scorer, text)
    assert realness.shape == text.shape
    torch.testing.assert_close(realness[CHUNK], scorer(text[CHUNK : CHUNK + 1])[0].sigmoid())
    scorer = judge(judge_head="cls")
    with_cls = torch.cat((torch.tensor([TOKENIZER.cls_token_id]), text[-1]))[None]
    torch.testing.assert_close(calculate_judge_scores(scorer, text, TOKENIZER.cls_token_id)[-1:],
                               1 - scorer(with_cls).sigmoid())


def test_the_judge_reads_few_texts_at_once():
    scorer, rows = judge(), []
    scorer.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    calculate_judge_scores(scorer, torch.zeros(2 * CHUNK + 3, 32, dtype=torch.long), TOKENIZER.cls_token_id)
    assert rows == [CHUNK, CHUNK, 3]


def test_auc_and_ranks_against_loops():
    a = np.round(np.random.default_rng(0).normal(1, 1, 40), 1)
    b = np.round(np.random.default_rng(1).normal(0, 1, 30), 1)
    by_hand = np.mean([1.0 if x > y else 0.5 if x == y else 0.0 for x in a for y in b])
    assert abs(auc(a, b) - by_hand) < 1e-12
    assert average_ranks(np.array([3, 1, 3, 2])).tolist() == [3.5, 1, 3.5, 2]


@pytest.mark.parametrize("head", ["realness", "cls"])
def test_a_judge_learns_from_fills_of_every_generator_and_from_clean_text(dataset, head):
    c = config(batch_size=64)
    fillers = [model(seed=1), model(seed=2)]
    filled_text = FilledText(consumer(dataset, c), fillers, "cpu", head, clean_share=0.3)
    filled, target, mask = filled_text.batch("train", 0)
    if head == "cls":
        assert (filled[:, 0] == TOKENIZER.cls_token_id).all()
        filled = filled[:, 1:]
    assert torch.equal(filled[~mask], target[~mask]) and filled.max() < TOKENIZER.base_vocab_size
    clean = (filled == target).all(1).float().mean()
    assert 0.1 < clean < 0.5
    again = FilledText(consumer(dataset, c), fillers, "cpu", head, clean_share=0.3).batch("train", 0)[0]
    assert torch.equal(again[:, -32:], filled), "pure in (seed, rank, step)"
    swapped = FilledText(consumer(dataset, c), fillers[::-1], "cpu", head, clean_share=0.3).batch("train", 0)[0]
    assert not torch.equal(swapped[:, -32:], filled)


def test_the_report_of_a_judge_that_knows_the_truth(dataset):
    data = consumer(dataset, config(batch_size=16, mask_low=0.05, mask_high=0.6))
    truths = torch.cat([unpack_batch(data.batch("val", s), "cpu")[1] for s in range(2)])

    class Oracle:
        judge_head = "realness"

        def __call__(self, text):
            known = (text[:, None] == truths).float()                                 # against the nearest true text
            return 20 * known[torch.arange(len(text)), known.mean(2).argmax(1)] - 10

    report = judge_report(Oracle(), data, model(scale=1.0), "cpu", batches=2)
    assert report["auc"] == 1 and report["pearson"] > 0.99 and report["spearman"] > 0.99


def test_the_report_fills_as_the_generator_would(dataset, monkeypatch):
    """Every text that the judge is shown comes from the whole of the filler's distribution."""
    data, seen = consumer(dataset, config(batch_size=16)), []
    uniform = model()
    with torch.no_grad():
        uniform.head.weight.zero_()
    score = lambda scorer, text, cls: seen.append(text) or torch.rand(len(text))
    monkeypatch.setattr("core.judge.calculate_judge_scores", score)
    judge_report(judge(), data, uniform, "cpu", batches=4)
    for start in (0, 1):  # varied masks, then 30%
        changed = torch.cat([(text - truth)[text != truth] + truth[text != truth]
                             for text, truth in zip(seen[start::3], seen[2::3], strict=True)])
        assert len(changed) > 500 and abs(changed.float().mean() - 47.5) < 4, "uniform over the 96 characters"


def test_a_report_has_the_auc_of_single_tokens_with_and_without_what_a_told_judge_is_told(dataset):
    class Told(torch.nn.Module):
        """Knows nothing untold; of filled-in tokens it knows which are the first of the alphabet."""
        judge_head = "told"

        def mark(self, tokens, filled):
            return tokens + 1000 * filled

        def forward(self, tokens):
            return torch.where(tokens >= 1000, -(tokens - 1000).float(), 0.0)

    data, filler = consumer(dataset, config(batch_size=16)), model()
    report = judge_report(Told(), data, filler, "cpu", batches=2)
    assert report["token_auc"] == 0.5 != report["told_token_auc"]
    assert "told_token_auc" not in judge_report(judge(), data, filler, "cpu", batches=1)
    assert "token_auc" not in judge_report(judge(judge_head="cls"), data, filler, "cpu", batches=1)
