"""The judge: its score, its lessons, its report; and the metrics that it does not see."""

import numpy as np
import pytest
import torch

from core.batch import unpack_batch
from core.judge import CHUNK, FilledText, auc, average_ranks, calculate_judge_scores, judge_report
from grpo.evaluate import Evaluation, best_and_worst, lexicon, touched_words
from grpo.samples import format_samples
from tests.tiny import TOKENIZER, config, consumer, judge, model, one_process


def test_scores_are_mean_realness_or_one_minus_the_regressed_share():
    text = torch.randint(0, 96, (CHUNK + 5, 32))
    scorer = judge()
    scores = calculate_judge_scores(scorer, text, TOKENIZER.cls_token_id)
    assert scores.shape == (CHUNK + 5,) and ((scores > 0) & (scores < 1)).all()
    torch.testing.assert_close(scores[-1], scorer(text[-1:]).sigmoid().mean())
    scorer = judge(judge_head="cls")
    with_cls = torch.cat((torch.tensor([TOKENIZER.cls_token_id]), text[-1]))[None]
    torch.testing.assert_close(calculate_judge_scores(scorer, text, TOKENIZER.cls_token_id)[-1:],
                               1 - scorer(with_cls).sigmoid())


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
    lessons = FilledText(consumer(dataset, c), fillers, "cpu", head, clean_share=0.3)
    filled, target, mask = lessons.batch("train", 0)
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
        config = judge().config

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
    judge_report(None, data, uniform, "cpu", batches=4)
    for start in (0, 1):  # varied masks, then 30%
        changed = torch.cat([(text - truth)[text != truth] + truth[text != truth]
                             for text, truth in zip(seen[start::3], seen[2::3], strict=True)])
        assert len(changed) > 500 and abs(changed.float().mean() - 47.5) < 4, "uniform over the 96 characters"


def test_words_are_those_of_the_true_text_that_a_mask_touches():
    truth = "ar the quick fox, go"
    mask = np.zeros(20, dtype=bool)
    mask[[0, 8, 9, 16, 19]] = True
    words = [truth[a:b] for a, b in touched_words(truth, mask)]
    assert words == ["quick"], "words cut by the window's edge do not count"
    assert lexicon("The quick, the_Dead 42") == {"the", "quick", "dead"}


def test_evaluation_of_a_policy_that_knows_the_truth(dataset):
    c = config(eval_problems=6, eval_completions=3)
    data = consumer(dataset, c)

    class Oracle(torch.nn.Module):
        config = model().config

        def forward(self, input, position):
            row = [i for x in input for i, (shown, *_) in enumerate(evaluation.problems) if torch.equal(shown, x)]
            truth = torch.stack([evaluation.problems[i][1] for i in row]).gather(1, position)
            return 50.0 * torch.nn.functional.one_hot(truth, 96)

    evaluation = Evaluation(data, Oracle(), judge(), None, 6, 3, (1.0, 0, 0.0), one_process(), torch.float32)
    metrics, shown = evaluation(Oracle(), 1.0)
    assert len(evaluation.problems) == 6 and shown[0]["best"] == shown[0]["truth"] != shown[0]["problem"]
    assert metrics["token_accuracy"] == 1 and metrics["words_recovered"] == 1 and metrics["unique_completions"] == 1
    assert metrics["word_validity"] == 1 and metrics["kl"] == 0 and metrics["entropy"] < 1e-6
    assert "gold_judge" not in metrics
    noisy, _ = evaluation(model(scale=1.0), 1.0)
    assert noisy["token_accuracy"] < 0.2 and noisy["word_validity"] < 0.2
    assert noisy["unique_completions"] > 2 and noisy["kl"] > 1
    assert abs(noisy["entropy"] - np.log(96)) < 0.1
    assert evaluation(model(scale=1.0), 1.0)[0] == noisy, "the same problems and the same noise every time"
    for truncation, passes in (((1.0, 1, 0.0), 1), ((1.0, 0, 1.0), 2), ((1e-6, 0, 0.0), 2)):
        surest = Evaluation(data, None, None, None, 6, 3, truncation, one_process(), torch.float32, passes=passes)
        found = surest(model(), 1.0)[0]["unique_completions"]
        assert found == 1 if passes == 1 else found < evaluation(model(), 1.0)[0]["unique_completions"], truncation

    input, target, mask, _ = (x[None] if torch.is_tensor(x) else x for x in evaluation.problems[0])
    text = torch.stack((input, target, input), 1)
    record = best_and_worst(input, target, mask, text, torch.tensor([[0.5, 0.9, 0.1]]), TOKENIZER)[0]
    assert (record["best_score"], record["worst_score"], record["best"]) == (0.9, 0.1, record["truth"])
    assert "\033[" in format_samples([record], True) and "\033[" not in format_samples([record], False)
