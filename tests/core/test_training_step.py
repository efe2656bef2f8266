"""The optimizers, the end of an optimizer step, and the supervised step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from core.supervised.config import PretrainConfig
from core.training_step import apply_gradients, build_optimizers, set_learning_rate, training_step
from tests.tiny import Catcher, clear_gradient, flat_gradient, model, one_process, optimizer_state, same

CONFIG = PretrainConfig(learning_rate=1e-2, weight_decay=0.1)


def batches(count=2, rows=3):
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(0, 96, (rows, 12), generator=generator)
    masks = [torch.rand(rows, 12, generator=generator) < 0.5 for _ in range(count)]
    for mask in masks:
        mask[:, 0] = True
    return [(draw(), draw(), mask) for mask in masks]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer_and_vectors_do_not_decay(optimizer):
    net = model(n_layer=2)
    optimizers = build_optimizers(net, replace(CONFIG, optimizer=optimizer))
    assert [type(o).__name__ for o in optimizers] == (["AdamW", "Muon"] if optimizer == "muon" else ["AdamW"])
    groups = [(o, group) for o in optimizers for group in o.param_groups]
    listed = [id(p) for _, group in groups for p in group["params"]]
    assert sorted(listed) == sorted(map(id, net.parameters()))
    names = {id(p): name for name, p in net.named_parameters()}
    for o, group in groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.1 if p.dim() == 2 else 0.0), names[id(p)]
            by_muon = optimizer == "muon" and p.dim() == 2 and names[id(p)].startswith("blocks.")
            assert (type(o).__name__ == "Muon") == by_muon, names[id(p)]


def test_an_unknown_optimizer_is_refused():
    config = SimpleNamespace(optimizer="sgd", learning_rate=1e-3, weight_decay=0.0)
    with pytest.raises(ValueError, match="optimizer='sgd' is not one of adamw, muon"):
        build_optimizers(model(), config)


def test_the_gradient_is_that_of_the_mean_loss_over_all_micro_batches():
    net, found = model(), []
    (tokens, target, mask), (tokens_2, target_2, mask_2) = parts = batches()
    together = [(torch.cat((tokens, tokens_2)), torch.cat((target, target_2)), torch.cat((mask, mask_2)))]

    catcher, metrics = Catcher(net), []
    for cut in (parts, together):
        metrics.append(training_step(net, cut, [catcher], 0.0, one_process()))
        found.append(catcher.gradient)
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()
    for name in ("loss", "accuracy", "grad_norm"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-5)
    clear_gradient(net)
    where = together[0][2]
    loss = torch.nn.functional.cross_entropy(net(together[0][0])[where], together[0][1][where])
    loss.backward()
    assert metrics[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics[0]["grad_norm"] == pytest.approx(float(flat_gradient(net).norm()), rel=1e-4)
    assert (found[0] - flat_gradient(net)).norm() < 1e-4 * found[0].norm()
    set_learning_rate([catcher], 1e-3)
    assert catcher.param_groups[0]["lr"] == 1e-3


def test_the_gradient_is_clipped_to_its_largest_norm():
    net, norms = model(), []
    catcher = Catcher(net)
    for clip in (0.0, 0.5, 1e6):
        metrics = training_step(net, batches(), [catcher], clip, one_process())
        norms.append(float(catcher.gradient.norm()))
        assert metrics["grad_norm"] > 0.5, "the norm before it is clipped"
    assert norms[1] == pytest.approx(0.5, rel=1e-4) and norms[0] == pytest.approx(norms[2], rel=1e-6)


def trained(optimizer):
    """A model and its optimizers after two steps, so that they have momentum."""
    net = model()
    optimizers = build_optimizers(net, replace(CONFIG, optimizer=optimizer))
    for _ in range(2):
        training_step(net, batches(), optimizers, 1.0, one_process())
    return net, optimizers


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["empty", "bad gradient", "bad sum"])
def test_a_step_that_is_empty_or_not_finite_moves_neither_weights_nor_momentum(optimizer, kind):
    net, optimizers = trained(optimizer)
    before, momentum = {k: v.clone() for k, v in net.state_dict().items()}, optimizer_state(optimizers)
    assert momentum and any(x.any() for x in momentum)
    if kind == "bad gradient":
        next(net.parameters()).grad = torch.full_like(next(net.parameters()), torch.nan)
    sums = {"loss": torch.tensor(torch.inf if kind == "bad sum" else 1.0), "count": 0.0 if kind == "empty" else 8.0}
    out = apply_gradients(net.parameters(), optimizers, 1.0, sums, one_process(), "count", mean=True)
    assert out["empty_steps"] == (kind == "empty") and out["skipped_steps"] == (kind != "empty")
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(optimizer_state(optimizers), momentum, strict=True))
    assert all(p.grad is None for p in net.parameters())
    training_step(net, batches(), optimizers, 1.0, one_process())
    assert not any(torch.equal(x, before[name]) for name, x in net.state_dict().items()), "the next step moves it"


def test_a_zero_gradient_with_tokens_in_the_loss_is_an_ordinary_step():
    net, optimizers = trained("adamw")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    out = apply_gradients(net.parameters(), optimizers, 1.0, {"count": 5.0}, one_process(), "count")
    assert out == {"count": 5.0, "grad_norm": 0.0, "skipped_steps": 0, "empty_steps": 0}
    assert not any(torch.equal(x, before[name]) for name, x in net.state_dict().items()), "momentum moves the weights"


def test_of_largest_numbers_the_maximum_over_ranks_is_taken_and_not_the_sum():
    class Ranks(type(one_process())):
        """Two ranks of which the other has the numbers of this one, raised by 1."""
        total, largest = lambda self, x: 2 * x + 1, lambda self, x: x + 1

    net, optimizers = trained("adamw")
    out = apply_gradients(net.parameters(), optimizers, 1.0, {"loss": torch.tensor(2.0), "count": 4.0},
                          Ranks("cpu", "float32"), "count", largest={"a": torch.tensor(7.0), "b": 0.0})
    assert {key: out[key] for key in ("loss", "count", "a", "b")} == {"loss": 5.0, "count": 9.0, "a": 8.0, "b": 1.0}


def test_a_sum_that_does_not_decide_may_be_infinite():
    for deciding, skipped in ((("loss",), 0), (None, 1), (("loss", "shown"), 1)):
        net, optimizers = trained("adamw")
        before = {k: v.clone() for k, v in net.state_dict().items()}
        out = apply_gradients(net.parameters(), optimizers, 1.0, {"loss": 1.0, "count": 5.0, "shown": 2.7e43},
                              one_process(), "count", deciding=deciding)
        assert out["skipped_steps"] == skipped and out["shown"] == float("inf")
        assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items()) == bool(skipped)


def test_frozen_parameters_are_left_alone():
    net = model()
    net.embed.requires_grad_(False)
    before, optimizers = net.embed.weight.clone(), build_optimizers(net, CONFIG)
    metrics = training_step(net, batches(), optimizers, 1.0, one_process())
    assert metrics["skipped_steps"] == 0 and torch.equal(net.embed.weight, before)
    assert not same(net, model())


def test_a_step_computes_in_the_type_of_the_run():
    seen, losses = [], {}
    for dtype in ("float32", "bfloat16"):
        net = model()
        net.blocks[0].up.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        metrics = training_step(net, batches(), build_optimizers(net, CONFIG), 1.0, one_process(dtype))
        losses[dtype] = metrics["loss"]
        assert all(p.dtype == torch.float32 for p in net.parameters())
    assert seen == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.02)
