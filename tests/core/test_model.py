"""The transformer, its cache, and the precision of its output layer."""

import pytest
import torch

from core.distributions import in_parts, token_logp
from core.model import (GPT, LANGUAGE_MODEL, MASKED_FILL, MODES, SEQUENCE_SCORER, GPTConfig, SquaredReLU, freeze,
                        rotary_table, rotate)
from tests.tiny import CAUSAL, causal_model, model


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
    chosen = net(tokens, position)
    for i in range(3):
        torch.testing.assert_close(chosen[i], whole[i, position[i]], rtol=1e-5, atol=1e-5)


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


def test_inputs_and_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="block_size=33"):
        model()(torch.zeros(1, 34, dtype=torch.long))
    for settings, message in (({"mode": "x"}, "mode='x'"), ({"judge_head": "x"}, "judge_head='x'"),
                              ({"n_head": 3}, "n_head"), ({"base_vocab_size": 101}, "base_vocab_size")):
        with pytest.raises(ValueError, match=message):
            GPT(GPTConfig(**settings))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_parameters_by_kind_covers_every_parameter_once(mode, tied):
    net = model(mode, tied=tied, n_layer=2)
    kinds = net.parameters_by_kind()
    listed = [id(p) for group in kinds.values() for p in group]
    assert sorted(listed) == sorted(map(id, net.parameters())) and len(set(listed)) == len(listed)
    names = {id(p): name for name, p in net.named_parameters()}
    assert {names[id(p)] for p in kinds["matrices"]} == {
        f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("attention.qkv", "attention.out", "up", "down")}
    heads = {"head.weight"} if mode == SEQUENCE_SCORER or not tied else set()
    assert {names[id(p)] for p in kinds["embeddings"]} == {"embed.weight"} | heads
    assert all(p.dim() == 1 for p in kinds["vectors"])


def test_a_model_names_its_longest_input_and_its_vocabulary():
    net, tokens = model(), torch.zeros(1, 33, dtype=torch.long)
    assert net(tokens[:, : net.longest_input]).shape == (1, 33, net.vocabulary)
    with pytest.raises(ValueError, match="does not fit"):
        net(torch.zeros(1, net.longest_input + 1, dtype=torch.long))


def test_logits_are_the_same_with_and_without_the_cache():
    net, tokens = causal_model(), torch.randint(0, 90, (3, 20))
    past, parts = net.new_cache(), []
    for part in tokens.split([7, 1, 1, 5, 6], dim=1):
        parts.append(net(part, past=past))
    torch.testing.assert_close(torch.cat(parts, 1), net(tokens), rtol=1e-4, atol=1e-4)

    past = net.new_cache()
    first = net(tokens[:, :9], past=past)
    roomy, parts = past.expand(torch.arange(3), room=11), [first]
    for t in range(9, 20):
        parts.append(net(tokens[:, t : t + 1], past=roomy))
    torch.testing.assert_close(torch.cat(parts, 1), net(tokens), rtol=1e-4, atol=1e-4)


def test_padding_on_the_left_changes_nothing():
    net, tokens = causal_model(), torch.randint(0, 90, (2, 10))
    padded = torch.cat((torch.full((2, 4), CAUSAL.pad_token_id), tokens), 1)
    shown = net(padded, padding=torch.tensor([4, 4]))[:, 4:]
    torch.testing.assert_close(shown, net(tokens), rtol=1e-4, atol=1e-4)
    other = padded.clone()
    other[:, :4] = 7  # the mask goes by position, so the tokens in the padding are never read
    assert torch.equal(shown, net(other, padding=torch.tensor([4, 4]))[:, 4:])


def test_a_cache_goes_on_after_rows_were_dropped():
    net, tokens = causal_model(n_layer=2), torch.randint(0, 90, (4, 12))
    past = net.new_cache()
    net(tokens[:, :8], past=past)
    past = past.expand(torch.arange(4), room=4)
    past.keep(torch.tensor([3, 1]))
    rest = torch.cat([net(tokens[[3, 1], t : t + 1], past=past) for t in range(8, 12)], 1)
    torch.testing.assert_close(rest, net(tokens)[[3, 1], 8:], rtol=1e-4, atol=1e-4)


def head_gradient(net, h, target, parts, monkeypatch, dtype=torch.bfloat16):
    """Gradient of the output layer's weights when the states h (K, C) are projected in this many parts."""
    monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", len(h) // parts * net.vocabulary)
    weight, calls, project = net.embed.weight if net.config.tied else net.head.weight, [], net.project
    weight.grad = None

    def predicted(h, target):
        calls.append(len(h))
        return (token_logp(project(h).log_softmax(-1), target),)

    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        (logp,) = in_parts(predicted, net.vocabulary, h, target)
    assert len(calls) == parts and sum(calls) == len(h)
    logp.sum().backward()
    return weight.grad.double()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_the_head_does_not_lose_precision_over_parts(tied, monkeypatch):
    net = model(tied=tied, scale=1.0)
    h, target = torch.randn(1024, 16), torch.randint(0, 96, (1024,))
    # The same rounding of states and weights everywhere, so that only the addition over parts differs
    truth = sum(head_gradient(net, h[i : i + 4], target[i : i + 4], 1, monkeypatch) for i in range(0, 1024, 4))
    error = lambda g: float((g - truth).norm() / truth.norm())
    one, many = (error(head_gradient(net, h, target, parts, monkeypatch)) for parts in (1, 256))
    assert many <= one and many < 1e-5, (one, many)
    exact = head_gradient(net, h, target, 1, monkeypatch, torch.float32)
    error = lambda g: float((g - exact).norm() / exact.norm())
    one, many = (error(head_gradient(net, h, target, parts, monkeypatch)) for parts in (1, 256))
    assert many < 1.2 * one, (one, many)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_can_compute_in_float32_under_autocast(tied):
    net, h = model(tied=tied), torch.randn(50, 16)
    exact = net.project(h)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = net.project(h)
        net.head_dtype = torch.float32
        whole = net.project(h)
    assert rounded.dtype == whole.dtype == torch.float32
    assert torch.equal(whole, exact) and not torch.equal(rounded, exact)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head_dtype", [None, torch.float32])
def test_logits_under_autocast_are_the_same_with_and_without_gradients(tied, head_dtype):
    """So that the first ratio is exactly 1: the rollouts are scored without gradients, the loss with them."""
    net, h = model(tied=tied), torch.randn(50, 16)
    net.head_dtype = head_dtype
    with torch.autocast("cpu", torch.bfloat16):
        learning = net.project(h)
        with torch.no_grad():
            scoring = net.project(h)
    assert learning.requires_grad and not scoring.requires_grad and torch.equal(learning, scoring)


def test_a_frozen_model_has_no_gradients_and_no_dropout():
    net = freeze(model(dropout=0.5).train())
    assert not net.training and not any(p.requires_grad for p in net.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [LANGUAGE_MODEL, MASKED_FILL])
def test_compiled_layers_compute_what_plain_ones_do_and_a_frozen_copy_exactly_the_same(mode, dtype):
    """So that the first ratio is 1 and the first KL is 0: a policy is read with gradients, its reference without."""
    torch.compiler.reset()
    net, tokens, padding = model(mode, n_layer=3, scale=2.0), torch.randint(0, 90, (4, 12)), torch.tensor([2, 0, 1, 0])
    plain, twin, rows = net.frozen(), net.frozen(), torch.tensor([0, 0, 1, 1, 2, 3])

    def read(net):
        """States of whole texts, and of texts that continue those of a cache."""
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            found, past = [net.states(tokens[:, 3:]), net.states(tokens[:, :5])], net.new_cache()
            if mode == LANGUAGE_MODEL:
                net.states(tokens[:, :7], past=past, padding=padding)
                found.append(net.states(tokens[rows, 7:], None, past.expand(rows), padding[rows]))
            return found

    net.compile_layers()
    twin.compile_layers()
    learning = read(net)
    sum(h.sum() for h in learning).backward()
    assert all(p.grad is not None for name, p in net.named_parameters() if name.startswith("blocks."))
    with torch.no_grad():
        for a, b, c in zip(learning, read(twin), read(plain), strict=True):
            assert a.requires_grad and torch.equal(a, b)
            close = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(b, c, rtol=close, atol=close)


@torch.no_grad()
def test_only_texts_are_read_by_compiled_layers_and_single_tokens_by_plain_ones(monkeypatch):
    net, tokens, names = causal_model(n_layer=2), torch.randint(0, 90, (2, 6)), []
    monkeypatch.setattr("core.model.compiled", lambda function: names.append(function.__name__) or function)
    past = net.new_cache()
    net(tokens, past=past)
    assert names == []
    net.compile_layers()
    net(tokens[:, :1], past=past)
    assert names == []
    net(tokens)
    assert names == ["before", "after"] * 2


def test_the_squared_relu_passes_finite_differences():
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.equal(SquaredReLU.apply(x), x.clamp(min=0) ** 2)
    assert torch.autograd.gradcheck(SquaredReLU.apply, x)


@pytest.mark.parametrize(("setting", "message"), [
    ({"n_layer": 100_000}, "n_layer=100000 must be at most 1e3"), ({"n_layer": -1}, "n_layer=-1 must be at least 1"),
    ({"n_embd": 2**20}, "n_embd=1048576 must be at most 65536"), ({"n_head": 0}, "n_head=0 must be at least 1"),
    ({"block_size": 10**12}, "block_size=1000000000000 must be at most 1e6"),
    ({"n_layer": "4"}, "n_layer='4' must be int, not str"), ({"tied": 1}, "tied=1 must be bool, not int"),
    ({"n_layer": True}, "n_layer=True must be int, not bool"), ({"mode": None}, "mode=None must be str"),
    ({"dropout": float("nan")}, "dropout=nan must be a number"), ({"n_head": 3}, "must be a multiple of 2 . n_head=6"),
    ({"base_vocab_size": 101}, "base_vocab_size=101 must be at most vocab_size=100"),
    ({"block_size": 10**6, "n_head": 1}, "block_size=1000000 . n_embd=128 / n_head=1 must be at most 33554432")])
def test_a_shape_that_cannot_be_is_refused_before_memory_is_taken(setting, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**setting)
