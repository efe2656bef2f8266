"""Score what was sampled: reported log-probabilities are those of the distribution that tokens come from."""

import numpy as np
import pytest
import torch

from core.batch import masked_positions
from core.losses import entropy, exact_kl, nucleus, sampling_logp, token_logp
from core.sampling import draw_uniforms, fill_in, fill_once, predict_and_sample_tokens, sample_from
from tests.tiny import TOKENIZER, model


class TinyVocabulary(torch.nn.Module):
    """A 'model' of 6 tokens whose logits depend on the position alone."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(2 * torch.randn(5, 6, generator=torch.Generator().manual_seed(3)))

    def forward(self, input, position):
        return self.logits[position]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
def test_frequencies_match_the_reported_log_probabilities(temperature, top_p):
    draws, net = 40_000, TinyVocabulary()
    position = torch.tensor([[0, 2, 4]])
    noise = draw_uniforms(1, 0, [0], (draws, 5))
    with torch.no_grad():
        target, logp = predict_and_sample_tokens(net, torch.zeros(1, 5).long(), position, noise, temperature, top_p)
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


def test_special_tokens_have_probability_exactly_zero():
    net = model(scale=30.0)
    input = torch.randint(0, 99, (4, 32))
    assert net(input).shape[-1] == TOKENIZER.base_vocab_size
    filled = fill_once(net, input, torch.ones(4, 32, dtype=torch.bool), draw_uniforms(0, 0, range(4), (50, 32)))
    assert filled.max() < TOKENIZER.base_vocab_size


def test_the_edges_of_the_unit_interval_pick_possible_tokens():
    logp = torch.tensor([[[-torch.inf, 0.5, 0.25, 0.25, -torch.inf]]]).clamp(max=0.5)
    logp[0, 0, 1:4] = torch.tensor([0.5, 0.25, 0.25]).log()
    u = torch.tensor([[[0.0], [1 - 1e-16], [0.4999], [0.5001]]], dtype=torch.float64)
    assert sample_from(logp, u).flatten().tolist() == [1, 3, 1, 2]


def test_nucleus_is_the_smallest_set_that_reaches_top_p():
    logp = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert nucleus(logp, 0.5).tolist() == [False, True, False, False]
    assert nucleus(logp, 0.76).tolist() == [False, True, True, True]
    assert nucleus(logp, 1e-9).tolist() == [False, True, False, False]


def test_entropy_and_kl_against_a_loop():
    a, b = torch.randn(2, 7).double().log_softmax(-1)
    assert abs(entropy(a) + sum(float(x.exp() * x) for x in a)) < 1e-12
    assert abs(exact_kl(a, b) - sum(float(x.exp() * (x - y)) for x, y in zip(a, b, strict=True))) < 1e-12
    truncated = sampling_logp(torch.randn(3, 7), 0.7, 0.4)
    assert torch.isfinite(entropy(truncated)).all()


def test_a_row_is_sampled_the_same_in_any_batch():
    net, generator = model(), torch.Generator().manual_seed(1)
    input = torch.randint(0, 96, (3, 32), generator=generator)
    mask = torch.rand(3, 32, generator=generator) < 0.4
    mask[1] = torch.arange(32) < 3  # few masks: padded when batched with the others
    input = input.masked_fill(mask, TOKENIZER.mask_token_id)
    numbers = [4, 9, 2]
    together = fill_once(net, input, mask, draw_uniforms(7, 5, numbers, (6, 32)))
    for i, number in enumerate(numbers):
        alone = fill_once(net, input[i : i + 1], mask[i : i + 1], draw_uniforms(7, 5, [number], (6, 32)))
        assert torch.equal(alone[0], together[i])
        assert torch.equal(alone[0][:, ~mask[i]], input[i][~mask[i]].expand(6, -1)), "what was not masked stays"


def test_group_members_and_problems_have_noise_of_their_own():
    noise = draw_uniforms(1, 2, [0, 1], (3, 4))
    assert len(noise.flatten().unique()) == noise.numel()
    assert not torch.equal(noise, draw_uniforms(1, 3, [0, 1], (3, 4)))


def test_masked_positions_and_fill_in_by_hand():
    mask = torch.tensor([[True, False, True], [False, True, False]])
    position, chosen = masked_positions(mask, "cpu")
    assert position.tolist()[0] == [0, 2] and position.tolist()[1][0] == 1 and chosen.tolist() == [[1, 1], [1, 0]]
    text = fill_in(torch.tensor([[9, 5, 9], [4, 9, 6]]), position, chosen, torch.tensor([[[1, 2]], [[3, 7]]]))
    assert text.tolist() == [[[1, 5, 2]], [[4, 3, 6]]]


def test_token_logp_gathers():
    logp = torch.randn(2, 3, 5)
    target = torch.tensor([[0, 4, 2], [1, 1, 3]])
    assert token_logp(logp, target)[1, 2] == logp[1, 2, 3]
