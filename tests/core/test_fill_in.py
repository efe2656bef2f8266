"""Fill-in sampling: reported log-probabilities are those of the distribution that tokens are drawn from."""

import math

import numpy as np
import pytest
import torch

from core import fill_in as fill_in_module
from core.distributions import KeptBudget, draw_uniforms, kept_tokens, restrict, sampling_logp
from core.fill_in import draw_turns, fill_in, fill_in_passes, fill_once, predict_and_sample_tokens
from core.masking import masked_positions, places_of_mask
from tests.tiny import TOKENIZER, config, consumer, masked_problems, model

MASK = TOKENIZER.mask_token_id


class TinyVocabulary(torch.nn.Module):
    """A 'model' of 6 tokens whose logits depend on the position alone."""

    def __init__(self):
        super().__init__()
        self.vocabulary = 6
        self.logits = torch.nn.Parameter(2 * torch.randn(5, 6, generator=torch.Generator().manual_seed(3)))

    def states(self, input, position):
        return position[..., None]

    def project(self, states):
        return self.logits[states[:, 0]]


def passes(net, dataset, c, S, **more):
    batch, input, position, chosen = masked_problems(consumer(dataset, c))
    noise = draw_uniforms(c.seed, 0, batch["number"], (2, c.group_size, c.block_size))
    return fill_in_passes(net, input, position, chosen > 0, noise[:, 0], noise[:, 1], S, **more)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
def test_frequencies_match_the_reported_log_probabilities(temperature, top_p):
    draws, net = 40_000, TinyVocabulary()
    position = torch.tensor([[0, 2, 4]])
    noise = draw_uniforms(1, 0, [0], (draws, 5))
    with torch.no_grad():
        target, logp, allowed = predict_and_sample_tokens(net, torch.zeros(1, 5).long(), position, noise, temperature,
                                                          top_p)
    for m, place in enumerate(position[0].tolist()):
        # the same distribution, by hand, in numpy
        p = np.exp(net.logits[place].detach().double().numpy() / temperature)
        p /= p.sum()
        order = np.argsort(-p)
        size = next(k for k in range(1, 7) if p[order[:k]].sum() >= top_p - 1e-9)
        kept = np.zeros(6)
        kept[order[:size]] = p[order[:size]] / p[order[:size]].sum()
        counts = np.bincount(target[0, :, m].numpy(), minlength=6)
        assert counts[kept == 0].sum() == 0
        chi_square = ((counts - draws * kept)[kept > 0] ** 2 / (draws * kept[kept > 0])).sum()
        assert chi_square < 25  # 5 degrees of freedom: one in 7,000
        reported = logp[0, :, m].exp().numpy()
        np.testing.assert_allclose(reported, kept[target[0, :, m].numpy()], rtol=1e-4)
        assert top_p == 1.0 or allowed.dense(6)[m].tolist() == (kept > 0).tolist()
    assert (allowed is None) == (top_p == 1.0)


def test_special_tokens_have_probability_exactly_zero():
    net = model(scale=30.0)
    input = torch.randint(0, 99, (4, 32))
    assert net(input).shape[-1] == TOKENIZER.base_vocab_size
    filled = fill_once(net, input, torch.ones(4, 32, dtype=torch.bool), draw_uniforms(0, 0, range(4), (50, 32)))
    assert filled.max() < TOKENIZER.base_vocab_size


def test_a_row_is_sampled_the_same_in_any_batch():
    net, generator = model(), torch.Generator().manual_seed(1)
    input = torch.randint(0, 96, (3, 32), generator=generator)
    mask = torch.rand(3, 32, generator=generator) < 0.4
    mask[1] = torch.arange(32) < 3  # few masks: padded when batched with the others
    input = input.masked_fill(mask, MASK)
    numbers = [4, 9, 2]
    together = fill_once(net, input, mask, draw_uniforms(7, 5, numbers, (6, 32)))
    for i, number in enumerate(numbers):
        alone = fill_once(net, input[i : i + 1], mask[i : i + 1], draw_uniforms(7, 5, [number], (6, 32)))
        assert torch.equal(alone[0], together[i])
        assert torch.equal(alone[0][:, ~mask[i]], input[i][~mask[i]].expand(6, -1)), "what was not masked stays"


def test_masked_positions_and_fill_in_by_hand():
    mask = torch.tensor([[True, False, True], [False, True, False]])
    position, chosen = masked_positions(mask, "cpu")
    assert position.tolist()[0] == [0, 2] and position.tolist()[1][0] == 1 and chosen.tolist() == [[1, 1], [1, 0]]
    text = fill_in(torch.tensor([[9, 5, 9], [4, 9, 6]]), position, chosen, torch.tensor([[[1, 2]], [[3, 7]]]))
    assert text.tolist() == [[[1, 5, 2]], [[4, 3, 6]]]


def test_one_pass_is_the_one_pass_sampler(dataset):
    c, net = config(), model()
    batch, input, position, chosen = masked_problems(consumer(dataset, c))
    noise = draw_uniforms(c.seed, 0, batch["number"], (c.group_size, c.block_size))
    order = torch.rand(noise.shape, dtype=torch.float64)
    target, logp, kept = predict_and_sample_tokens(net, input, position, noise, 0.8, 0.9)
    again, logp_again, turn, read, kept_again = fill_in_passes(net, input, position, chosen > 0, noise, order, 1, 0.8, 0.9)
    hidden = chosen.repeat_interleave(4, 0) > 0
    assert torch.equal(target.flatten(0, 1)[hidden], again[hidden]) and not again[~hidden].any()
    torch.testing.assert_close(logp.flatten(0, 1)[hidden], logp_again[hidden])
    kept = kept.dense(96).view(-1, position.shape[1], 96).repeat_interleave(4, 0)   # (N, M, V)
    assert torch.equal(kept[hidden], kept_again.dense(96))
    assert (turn[hidden] == 0).all() and torch.equal(read[:, 0], input.repeat_interleave(4, 0))


@pytest.mark.parametrize("S", [2, 3, 40])
def test_every_hidden_place_has_its_turn_in_random_order(S):
    chosen = torch.zeros(500, 12)
    chosen[:, :10] = 1.0
    turn = draw_turns(torch.rand(500, 12), chosen, S)
    assert (turn[:, 10:] == -1).all() and turn[:, :10].min() == 0 and turn.max() < S
    for row in turn[:5, :10]:
        counts = [int((row == s).sum()) for s in range(S)]
        assert sum(counts) == 10 and max(counts) - min(counts) <= 1
    share = (turn[:, :10] == 0).float().mean(0)
    assert (share - share.mean()).abs().max() < 0.1, "each place comes first equally often"


@torch.no_grad()
def test_a_pass_reads_the_tokens_of_the_passes_before_it(dataset):
    c, net = config(), model()
    target, logp, turn, read, kept = passes(net, dataset, c, 3)
    _, input, position, _ = masked_problems(consumer(dataset, c))
    assert kept is None
    for n in range(len(target)):
        text = input[n // 4].clone()
        for s in range(3):
            assert torch.equal(read[n, s], text)
            p = sampling_logp(net(text[None]), 1.0)[0]
            for m in range(target.shape[1]):
                if turn[n, m] == s:
                    place, token = position[n // 4, m], target[n, m]
                    assert abs(float(p[place, token] - logp[n, m])) < 1e-4
                    text[place] = token
        assert not (text == MASK).any()


@torch.no_grad()
def test_each_token_has_the_kept_tokens_of_the_pass_that_drew_it(dataset):
    c, net = config(batch_size=2), model()
    target, logp, turn, read, kept = passes(net, dataset, c, 3, top_k=5)
    _, _, position, chosen = masked_problems(consumer(dataset, c))
    hidden = chosen.repeat_interleave(4, 0) > 0                                      # (N, M)
    assert len(kept) == hidden.sum() and not logp[~hidden].any()
    for allowed, (n, m) in zip(kept.dense(96), hidden.nonzero().tolist(), strict=True):
        full = sampling_logp(net(read[n, turn[n, m]][None])[0, position[n // 4, m]])
        assert torch.equal(allowed, kept_tokens(full, top_k=5)) and allowed.sum() == 5 and allowed[target[n, m]]
        assert abs(float(restrict(full, allowed)[target[n, m]] - logp[n, m])) < 1e-4


@torch.no_grad()
def test_logits_are_made_only_where_a_token_is_drawn(dataset, monkeypatch):
    c, net, rows = config(batch_size=3), model(), []
    project = net.project
    monkeypatch.setattr(net, "project", lambda h: rows.append(h.shape[:-1].numel()) or project(h))
    target, _, turn, _, _ = passes(net, dataset, c, 3)
    first = (turn == 0).view(3, 4, -1).any(1)  # the completions of a problem share the first text
    assert rows == [int(first.sum()), int((turn == 1).sum()), int((turn == 2).sum())]
    assert sum(rows) < target.numel()


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}])
@torch.no_grad()
def test_texts_with_fewer_hidden_tokens_than_passes_are_filled_in(truncation):
    net, mask = model(), torch.arange(32) < torch.tensor([[2], [1]])
    input, (position, _) = torch.full((2, 32), 5).masked_fill(mask, MASK), masked_positions(mask, "cpu")
    noise = draw_uniforms(0, 0, [0, 1], (2, 3, 32))
    places = places_of_mask(mask)
    target, logp, turn, read, kept = fill_in_passes(net, input, position, places, noise[:, 0], noise[:, 1], 4,
                                                    **truncation)
    hidden = places.repeat_interleave(3, 0)
    assert read.shape == (6, 4, 32) and (logp[hidden] < 0).all() and set(turn[hidden].tolist()) == {0, 2}
    assert kept is None if not truncation else len(kept) == hidden.sum()
    last = fill_in(read[:, -1], position.repeat_interleave(3, 0), hidden.float(), target[:, None])[:, 0]
    assert not (last == MASK).any()


def test_several_passes_sample_the_chain_rule():
    """Two places whose tokens depend on each other: frequencies equal the product of reported conditionals."""
    class Coupled(torch.nn.Module):
        vocabulary = 2

        def states(self, input, position):
            logits = torch.zeros(len(input), 2, 2)
            logits[:, 0, 1] = 1.0
            other = input.gather(1, torch.tensor([[1, 0]]).expand(len(input), -1))   # the token at the other place
            logits[..., 1] += torch.where(other == 9, 0.0, torch.where(other == 1, 2.0, -2.0))
            return logits

        def project(self, states):
            return states

    N = 20_000
    noise = torch.rand(2, 1, N, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    input, position, chosen = torch.full((1, 2), 9), torch.tensor([[0, 1]]), torch.ones(1, 2)
    target, logp, turn, _, _ = fill_in_passes(Coupled(), input, position, chosen > 0, noise[0], noise[1], 2)
    for first in (0, 1):
        rows = turn[:, first] == 0
        for a in (0, 1):
            for b in (0, 1):
                these = rows & (target[:, 0] == a) & (target[:, 1] == b)
                p = float(logp[these][0].sum().exp())
                seen = int(these.sum()) / int(rows.sum())
                assert abs(seen - p) < 4 * math.sqrt(p * (1 - p) / int(rows.sum())), (first, a, b)


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("temperature", [0.8, "rows"])
@torch.no_grad()
def test_logits_in_parts_fill_in_the_same_tokens(dataset, S, temperature, monkeypatch):
    c, net, found, sizes = config(), model(), [], []
    _, input, position, chosen = masked_problems(consumer(dataset, c))
    noise = draw_uniforms(0, 0, range(len(input)), (2, 5, c.block_size))
    project = net.project
    monkeypatch.setattr(net, "project", lambda h: sizes.append(h.shape[:-1].numel() * 96) or project(h))
    for at_once in (2**25, 2 * position.shape[1] * 96):
        monkeypatch.setattr(fill_in_module, "LOGITS_AT_ONCE", at_once)
        sizes.clear()
        if temperature == "rows":
            each = torch.linspace(0.5, 2.0, len(input))[:, None, None]
            found.append(predict_and_sample_tokens(net, input, position, noise[:, 0], each, top_p=0.9))
        else:
            found.append(fill_in_passes(net, input, position, chosen > 0, noise[:, 0], noise[:, 1], S, temperature, 0.9))
    whole, parts = found
    assert max(sizes) <= at_once and len(sizes) > 1
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[-1].dense(96), parts[-1].dense(96))
    torch.testing.assert_close(whole[1], parts[1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_kept_tokens_that_do_not_fit_end_the_passes(dataset):
    c, net = config(batch_size=16, group_size=64), model(scale=0.1)
    settings = {"top_p": 0.99, "budget": KeptBudget(1)}
    with pytest.raises(ValueError, match="stored_megabytes=1 .*top_k=50"):
        passes(net, dataset, c, 2, **settings)
    assert len(passes(net, dataset, c, 2, top_k=2, budget=KeptBudget(1))[-1]) > 1000
