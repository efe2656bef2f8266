"""A judge's score of a text, against single forward passes."""

import pytest
import torch

from core.judge import CHUNK, calculate_judge_scores, calculate_realness, windowed_mean
from tests.tiny import TOKENIZER, judge


def test_a_score_is_the_mean_realness_or_one_minus_the_regressed_share():
    text = torch.randint(0, 96, (2 * CHUNK + 3, 32))
    scorer, rows = judge(), []
    expected = torch.stack([scorer(row[None])[0].sigmoid() for row in text])
    scorer.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    torch.testing.assert_close(calculate_realness(scorer, text), expected)
    torch.testing.assert_close(calculate_judge_scores(scorer, text, TOKENIZER.cls_token_id), expected.mean(1))
    assert rows == [CHUNK, CHUNK, 3] * 2, "few texts at once"
    scorer = judge(judge_head="cls")
    with_cls = torch.cat((torch.tensor([TOKENIZER.cls_token_id]), text[-1]))[None]
    torch.testing.assert_close(calculate_judge_scores(scorer, text, TOKENIZER.cls_token_id)[-1:],
                               1 - scorer(with_cls).sigmoid())


@pytest.mark.parametrize("width", [0, 1, 3, 20])
def test_a_windowed_mean_is_that_of_a_loop(width):
    x = torch.randn(3, 11)
    for n in range(3):
        for t in range(11):
            near = x[n, [s for s in range(11) if abs(s - t) <= width]]
            torch.testing.assert_close(windowed_mean(x, width)[n, t], near.mean())
