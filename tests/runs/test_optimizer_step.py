"""The end of an optimizer step: who updates what, clipping, steps that move nothing, the learning rate."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from core.optim import CosineLRScheduler, build_optimizers, clip_gradients, set_learning_rate, step_optimizers
from core.supervised.config import PretrainConfig
from tests.tiny import Catcher, flat_gradient, model, optimizer_state, same

CONFIG = PretrainConfig(learning_rate=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer_and_vectors_do_not_decay(optimizer):
    net = model(n_layer=2)
    optimizers = build_optimizers(net, replace(CONFIG, optimizer=optimizer))
    set_learning_rate(optimizers, 0.5)
    found = {p: (type(o).__name__, group["lr"], group["weight_decay"])
             for o in optimizers for group in o.param_groups for p in group["params"]}
    assert len(found) == sum(len(group["params"]) for o in optimizers for group in o.param_groups)
    for name, p in net.named_parameters():
        by_muon = optimizer == "muon" and p.dim() == 2 and name.startswith("blocks.")
        assert found.pop(p) == ("Muon" if by_muon else "AdamW", 0.5, 0.1 if p.dim() == 2 else 0.0), name
    assert not found


def randomise_gradients(net):
    torch.manual_seed(0)
    for p in net.parameters():
        p.grad = torch.randn_like(p)


def end(net, optimizers, clip=1.0, loss=1.0, tokens=8.0):
    """Ends a step of one process."""
    norm = float(clip_gradients(net.parameters(), clip))
    good = math.isfinite(norm) and math.isfinite(loss)
    return step_optimizers(optimizers, good, tokens) | {"grad_norm": norm}


def test_the_gradient_is_clipped_to_its_largest_norm():
    net = model()
    catcher = Catcher(net)
    randomise_gradients(net)
    norm = float(flat_gradient(net).norm())
    for clip, expected in ((0.0, norm), (0.5, 0.5), (1e6, norm)):
        randomise_gradients(net)
        assert end(net, [catcher], clip)["grad_norm"] == pytest.approx(norm, rel=1e-5), "the norm before it is clipped"
        assert float(catcher.gradient.norm()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", ["empty", "bad gradient", "bad loss"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_empty_or_not_finite_moves_neither_weights_nor_momentum(kind, optimizer):
    net = model()
    optimizers = build_optimizers(net, replace(CONFIG, optimizer=optimizer))
    randomise_gradients(net)
    end(net, optimizers)
    before, momentum = copy.deepcopy(net), optimizer_state(optimizers)
    assert momentum and any(x.any() for x in momentum)
    randomise_gradients(net)
    if kind == "bad gradient":
        next(net.parameters()).grad.fill_(torch.nan)
    sums = {"empty": {"tokens": 0.0}, "bad loss": {"loss": math.inf}}
    out = end(net, optimizers, **sums.get(kind, {}))
    assert out["empty_steps"] == (kind == "empty") and out["skipped_steps"] == (kind != "empty")
    assert same(net, before) and all(map(torch.equal, optimizer_state(optimizers), momentum))
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(("settings", "rates"), [
    ((1.0, 0.1, 4, 14), {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 9: 0.55, 14: 0.1, 99: 0.1}),
    ((1.0, 0.2, 0, 8), {0: 1.0, 4: 0.6, 8: 0.2, 11: 0.2}), ((1e-5, None, 0, 8), {0: 1e-5, 8: 1e-6})])
def test_schedule_warms_up_decays_and_stays(settings, rates):
    """Without a lowest rate it ends at a tenth of the highest."""
    lr = CosineLRScheduler(*settings).lr
    assert {step: lr(step) for step in rates} == pytest.approx(rates)
