"""The transformer and its supervised losses."""

import pytest
import torch

from core.losses import replacement_target, supervised_sums
from core.model import GPT, LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, GPTConfig, rotary_table, rotate
from tests.tiny import model


def test_a_language_model_does_not_see_the_future_and_a_fill_model_does():
    tokens = torch.randint(0, 96, (2, 20))
    other = tokens.clone()
    other[:, 12] = (other[:, 12] + 1) % 96
    causal, fill = model(LANGUAGE_MODEL), model(MASKED_FILL)
    assert torch.equal(causal(tokens)[:, :12], causal(other)[:, :12])
    assert not torch.allclose(causal(tokens)[:, 12:], causal(other)[:, 12:])
    assert not torch.allclose(fill(tokens)[:, :12], fill(other)[:, :12])


@pytest.mark.parametrize("tied", [True, False])
def test_logits_at_chosen_positions_are_those_of_the_whole(tied):
    net, tokens = model(tied=tied), torch.randint(0, 96, (3, 20))
    position = torch.tensor([[0, 5], [19, 2], [7, 7]])
    whole = net(tokens)
    some = net(tokens, position)
    for i in range(3):
        torch.testing.assert_close(some[i], whole[i, position[i]], rtol=1e-5, atol=1e-5)


def test_rotary_scores_depend_on_distance_alone():
    cos, sin = rotary_table(40, 8)
    q, k = torch.randn(8), torch.randn(8)
    turned = lambda x: rotate(x.expand(1, 1, 40, 8), cos, sin)[0, 0]
    scores = turned(q) @ turned(k).T
    for distance in (0, 3, 11):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_scorer_shapes():
    tokens = torch.randint(0, 96, (3, 20))
    assert model(SEQUENCE_SCORER)(tokens).shape == (3, 20)
    assert model(SEQUENCE_SCORER, judge_head="cls")(tokens).shape == (3,)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="block_size=33"):
        model()(torch.zeros(1, 34, dtype=torch.long))
    for settings, message in (({"mode": "x"}, "mode='x'"), ({"judge_head": "x"}, "judge_head='x'"),
                              ({"n_head": 3}, "n_head"), ({"base_vocab_size": 101}, "base_vocab_size")):
        with pytest.raises(ValueError, match=message):
            GPT(GPTConfig(**settings))


def test_supervised_losses_against_loops():
    tokens, target = torch.randint(0, 96, (2, 12)), torch.randint(0, 96, (2, 12))
    mask = torch.rand(2, 12) < 0.5
    mask[:, 3] = True
    net = model()
    sums = supervised_sums(net, tokens, target, mask)
    by_hand = -sum(net(tokens)[i, t].log_softmax(-1)[target[i, t]] for i in range(2) for t in range(12) if mask[i, t])
    torch.testing.assert_close(sums["loss"], by_hand)
    assert sums["count"] == mask.sum()

    scorer = model(SEQUENCE_SCORER)
    shown = torch.where(mask, tokens, target)
    p = scorer(shown).sigmoid()
    by_hand = -sum((p[i, t] if shown[i, t] == target[i, t] else 1 - p[i, t]).log() for i in range(2) for t in range(12))
    sums = supervised_sums(scorer, shown, target, mask)
    torch.testing.assert_close(sums["loss"], by_hand, rtol=1e-4, atol=1e-4)
    assert sums["count"] == 24

    scorer = model(SEQUENCE_SCORER, judge_head="cls")
    with_cls = torch.cat((torch.full((2, 1), 98), shown), 1)
    by_hand = 0.0
    for i in range(2):
        x = sum(int(a != b) for a, b in zip(shown[i], target[i], strict=True)) / 12
        by_hand = by_hand + (scorer(with_cls)[i].sigmoid() - (x**4 - 2 * x**3 + 2 * x)) ** 2
    torch.testing.assert_close(supervised_sums(scorer, with_cls, target, mask)["loss"], by_hand)
    assert replacement_target(torch.tensor([0.0, 0.5, 1.0])).tolist() == [0.0, 0.8125, 1.0]
