"""The texts that a judge learns from, and how it is measured."""

import numpy as np
import pytest
import torch

from core.data import unpack_batch
from core.model import SEQUENCE_SCORER
from core.supervised.config import PretrainConfig
from core.supervised.judge_training import auc, average_ranks, filled_batch, judge_report
from tests.tiny import TOKENIZER, config, consumer, model


def test_auc_and_ranks_are_those_of_loops():
    a = np.round(np.random.default_rng(0).normal(1, 1, 40), 1)
    b = np.round(np.random.default_rng(1).normal(0, 1, 30), 1)
    by_hand = np.mean([1.0 if x > y else 0.5 if x == y else 0.0 for x in a for y in b])
    assert abs(auc(a, b) - by_hand) < 1e-12 and np.isnan(auc(a, b[:0]))
    assert average_ranks(np.array([3, 1, 3, 2])).tolist() == [3.5, 1, 3.5, 2]


@pytest.mark.parametrize("head", ["realness", "cls"])
def test_a_judge_learns_from_fills_of_every_generator_and_from_clean_text(dataset, head):
    fillers = [model(seed=1), model(seed=2)]
    settings = PretrainConfig(mode=SEQUENCE_SCORER, judge_head=head, clean_share=0.3)

    def batch(fillers):
        return filled_batch(consumer(dataset, config(batch_size=64)), fillers, "cpu", settings, "train", 0)

    filled, target, mask = batch(fillers)
    if head == "cls":
        assert (filled[:, 0] == TOKENIZER.cls_token_id).all()
        filled = filled[:, 1:]
    assert torch.equal(filled[~mask], target[~mask]) and filled.max() < TOKENIZER.base_vocab_size
    assert 0.1 < (filled == target).all(1).float().mean() < 0.5
    assert torch.equal(batch(fillers)[0][:, -32:], filled), "pure in (seed, rank, step)"
    assert not torch.equal(batch(fillers[::-1])[0][:, -32:], filled)


def test_the_report_of_a_judge_that_knows_the_true_texts(dataset):
    data = consumer(dataset, config(batch_size=16, mask_low=0.05, mask_high=0.6))
    truths = torch.cat([unpack_batch(data.batch("val", s), "cpu")[1] for s in range(2)])

    class Knowing:
        judge_head = "realness"

        def __call__(self, text):
            known = (text[:, None] == truths).float()                                # against the nearest true text
            return 20 * known[torch.arange(len(text)), known.mean(2).argmax(1)] - 10

    report = judge_report(Knowing(), data, model(scale=1.0), "cpu", batches=2)
    assert report["auc"] == report["token_auc"] == 1 and report["pearson"] > 0.99 and report["spearman"] > 0.99
