"""The supervised loss of each mode against loops, and its logits in bounded memory."""

import pytest
import torch

from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.supervised.loss import supervised_sums
from tests.tiny import clear_gradient, counted, flat_gradient, model


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


@pytest.mark.parametrize(("mode", "tied"), [(MASKED_FILL, True), (LANGUAGE_MODEL, False)])
def test_the_loss_is_the_same_in_parts_of_few_logits(mode, tied, monkeypatch):
    net, sizes, found = model(mode, tied=tied), [], []
    monkeypatch.setattr(net, "project", counted(net.project, sizes))
    tokens = torch.randint(0, 96, (6, 24))
    target = torch.where(torch.rand(6, 24) < 0.5, net(tokens).argmax(-1), torch.randint(0, 96, (6, 24)))
    mask = torch.rand(6, 24) < 0.6
    by_hand = sum(int(net(tokens)[i, t].argmax() == target[i, t]) for i in range(6) for t in range(24) if mask[i, t])
    for rows in (10**5, 20):
        monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", rows * 96)
        clear_gradient(net)
        sizes.clear()
        sums = supervised_sums(net, tokens, target, mask)
        sums["loss"].backward()
        assert max(sizes) <= rows and sums["correct"] == by_hand > 10
        found.append((sums["loss"].detach(), flat_gradient(net)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
