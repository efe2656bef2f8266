"""The transformer: padding, the precision of the output layer, a judge's score. That logits are those of Qwen3 with the
same weights is in tests/rooms/test_export.py."""

import pytest
import torch

from core.judge import CHUNK, calculate_judge_scores, calculate_realness
from core.model import SquaredReLU
from tests.tiny import CAUSAL, TOKENIZER, causal_model, judge, model

TIED = pytest.mark.parametrize("tied", [True, False])


def test_padding_on_the_left_changes_nothing_whatever_its_tokens():
    net, tokens = causal_model(), torch.randint(0, 90, (2, 10))
    for filler in (CAUSAL.pad_token_id, 7):
        padded = torch.cat((torch.full((2, 4), filler), tokens), 1)
        shown = net(padded, padding=torch.tensor([4, 4]))[:, 4:]
        torch.testing.assert_close(shown, net(tokens), rtol=1e-4, atol=1e-4)


def test_a_language_model_does_not_see_the_future_and_a_fill_model_does():
    tokens = torch.randint(0, 96, (2, 20))
    other = tokens.clone()
    other[:, 12] = (other[:, 12] + 1) % 96
    causal, fill = (abs(net(tokens) - net(other)).amax((0, 2)) for net in (causal_model(), model()))
    assert (causal[:12] == 0).all() and causal[12:].min() > 1e-3 and fill.min() > 1e-3


def test_the_squared_relu_passes_finite_differences():
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(SquaredReLU.apply(x), x.clamp(min=0) ** 2)
    assert torch.autograd.gradcheck(SquaredReLU.apply, x)
    frozen = x.detach().clone()
    assert torch.equal(SquaredReLU.apply(frozen), SquaredReLU.apply(x)) and torch.equal(frozen, x)


@TIED
def test_the_head_under_autocast_is_the_same_with_and_without_gradients(tied):
    """So that the first ratio is exactly 1: the rollouts are scored without gradients, the loss with them."""
    net, h = model(tied=tied), torch.randn(50, 16)
    with torch.autocast("cpu", torch.bfloat16):
        learning = net.project(h)
        with torch.no_grad():
            scoring = net.project(h)
    assert learning.requires_grad and torch.equal(learning, scoring) and learning.dtype == torch.float32


def test_a_judge_s_score_is_the_mean_realness_or_one_minus_the_regressed_share():
    text = torch.randint(0, 96, (2 * CHUNK + 3, 32))
    scorer, cls = judge(), judge(judge_head="cls")
    expected = torch.stack([scorer(row[None])[0].sigmoid() for row in text])
    torch.testing.assert_close(calculate_realness(scorer, text), expected)
    torch.testing.assert_close(calculate_judge_scores(scorer, text, TOKENIZER.cls_token_id), expected.mean(1))
    with_cls = torch.cat((torch.tensor([TOKENIZER.cls_token_id]), text[-1]))[None]
    torch.testing.assert_close(calculate_judge_scores(cls, text, TOKENIZER.cls_token_id)[-1:],
                               1 - cls(with_cls).sigmoid())
