"""The supervised loss of each mode against loops, and its logits in bounded memory."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.model import LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER
from core.supervised.loss import supervised_sums
from tests.tiny import clear_gradient, flat_gradient, model


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


class LargestLogits(TorchDispatchMode):
    """Notes the numbers in the largest tensor over the vocabulary that is made within."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.largest = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(x) and x.shape[-1:] == (self.vocabulary,):
                self.largest = max(self.largest, x.numel())
        return out


@pytest.mark.parametrize(("mode", "tied"), [(MASKED_FILL, True), (LANGUAGE_MODEL, False)])
def test_the_loss_is_the_same_in_parts_and_no_tensor_of_logits_exceeds_the_bound(mode, tied, monkeypatch):
    net, V = model(mode, tied=tied), 96
    tokens = torch.randint(0, V, (6, 24))
    target = torch.where(torch.rand(6, 24) < 0.5, net(tokens).argmax(-1), torch.randint(0, V, (6, 24)))
    mask = torch.rand(6, 24) < 0.6
    mask[:, 2] = True
    found = {}
    for bound in (2**25, 20 * V):
        monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", bound)
        clear_gradient(net)
        with LargestLogits(V) as seen:
            sums = supervised_sums(net, tokens, target, mask)
            sums["loss"].backward()
        found[bound] = {name: x.detach() for name, x in sums.items()}, flat_gradient(net), seen.largest
    (whole, g, large), (parts, g_parts, small) = found.values()
    assert small <= 20 * V < 6 * 12 * V < large
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name])
    by_hand = sum(int(net(tokens)[i, t].argmax() == target[i, t]) for i in range(6) for t in range(24) if mask[i, t])
    assert parts["correct"] == by_hand > 10
    assert (g_parts - g).norm() < 1e-5 * g.norm()
