"""The transformer: what a token reads, the precision of the output layer, a judge's score. That logits are those of
Qwen3 with the same weights is in tests/rooms/test_export.py."""

import pytest
import torch

from core.distributions import in_parts, token_logp
from core.judge import CHUNK, calculate_judge_scores, calculate_realness, windowed_mean
from core.model import LANGUAGE_MODEL, MASKED_FILL, SquaredReLU, attention_mask
from tests.tiny import CAUSAL, TOKENIZER, causal_model, judge, model

TIED = pytest.mark.parametrize("tied", [True, False])
PADDING = torch.tensor([0, 2, 5])


def test_a_language_model_does_not_see_the_future_and_a_fill_model_does():
    tokens = torch.randint(0, 96, (2, 20))
    other = tokens.clone()
    other[:, 12] = (other[:, 12] + 1) % 96
    causal, fill = model(LANGUAGE_MODEL), model(MASKED_FILL)
    assert torch.equal(causal(tokens)[:, :12], causal(other)[:, :12])
    assert not torch.allclose(causal(tokens)[:, 12:], causal(other)[:, 12:])
    assert not torch.allclose(fill(tokens)[:, :12], fill(other)[:, :12])


def test_padding_on_the_left_changes_nothing_whatever_its_tokens():
    net, tokens = causal_model(), torch.randint(0, 90, (2, 10))
    for filler in (CAUSAL.pad_token_id, 7):
        padded = torch.cat((torch.full((2, 4), filler), tokens), 1)
        shown = net(padded, padding=torch.tensor([4, 4]))[:, 4:]
        torch.testing.assert_close(shown, net(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("before", "T"), [(0, 6), (3, 4), (5, 1)])
def test_a_token_reads_no_padding_and_in_a_language_model_nothing_behind_it(before, T, causal):
    mask = attention_mask(before, T, PADDING, "cpu", causal).expand(3, 1, T, before + T)
    for row, padding in enumerate(PADDING.tolist()):
        for t in range(T):
            own = before + t
            for column in range(before + T):
                reads = column >= padding and (column <= own or not causal)
                assert mask[row, 0, t, column] == (reads or (causal and column == own))
    without = attention_mask(before, T, None, "cpu", causal)
    needed = causal and before > 0 and T > 1
    assert (without is not None) == needed
    if needed:
        assert torch.equal(without[0, 0], torch.ones(T, before + T).tril(before).bool())


def test_the_squared_relu_passes_finite_differences():
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(SquaredReLU.apply(x), x.clamp(min=0) ** 2)
    assert torch.autograd.gradcheck(SquaredReLU.apply, x)


def head_gradient(net, h, target, parts, monkeypatch, dtype=torch.bfloat16):
    """Gradient of the output layer's weights when the states h (K, C) are projected in this many parts."""
    monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", len(h) // parts * net.vocabulary)
    weight = net.embed.weight if net.config.tied else net.head.weight
    weight.grad = None

    def logp_of(h, target):
        return (token_logp(net.project(h).log_softmax(-1), target),)

    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logp, = in_parts(logp_of, net.vocabulary, h, target)
    logp.sum().backward()
    return weight.grad.double()


@TIED
def test_the_gradient_of_the_head_does_not_lose_precision_over_parts(tied, monkeypatch):
    net = model(tied=tied, scale=1.0)
    h, target = torch.randn(512, 16), torch.randint(0, 96, (512,))
    # The same rounding of states and weights everywhere, so that only the addition over parts differs
    truth = sum(head_gradient(net, h[i : i + 4], target[i : i + 4], 1, monkeypatch) for i in range(0, 512, 4))
    one, many = (head_gradient(net, h, target, parts, monkeypatch) for parts in (1, 128))
    distances = [float((x - truth).norm() / truth.norm()) for x in (many, one)]
    assert distances[0] <= distances[1] and distances[0] < 1e-5


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


@pytest.mark.parametrize("width", [0, 3, 20])
def test_a_windowed_mean_is_that_of_a_loop(width):
    x = torch.randn(3, 11)
    for n in range(3):
        for t in range(11):
            near = x[n, [s for s in range(11) if abs(s - t) <= width]]
            torch.testing.assert_close(windowed_mean(x, width)[n, t], near.mean())
