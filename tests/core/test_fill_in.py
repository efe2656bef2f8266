"""Fill-in sampling: reported log-probabilities are those of the distribution that tokens are drawn from."""

import pytest
import torch

from core.distributions import draw_uniforms
from core.fill_in import fill_in, fill_once, predict_and_sample_tokens
from core.masking import masked_positions
from tests.tiny import TOKENIZER, config, consumer, counted, expect_frequencies, masked_problems, model


class TinyVocabulary(torch.nn.Module):
    """A 'model' of 6 tokens whose logits depend on the position alone."""

    def __init__(self):
        super().__init__()
        self.vocabulary, self.logits = 6, 2 * torch.randn(5, 6)

    def states(self, input, position):
        return position[..., None]

    def project(self, states):
        return self.logits[states[:, 0]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
def test_frequencies_match_the_reported_log_probabilities(temperature, top_p):
    draws, net = 20_000, TinyVocabulary()
    position = torch.tensor([[0, 2, 4]])
    noise = draw_uniforms(1, 0, [0], (draws, 5))
    target, logp, allowed = predict_and_sample_tokens(net, torch.zeros(1, 5).long(), position, noise, temperature, top_p)
    for m, column in enumerate(position[0].tolist()):
        kept = expect_frequencies(target[0, :, m], logp[0, :, m], net.logits[column], temperature, top_p)
        assert top_p == 1.0 or allowed.dense(6)[m].tolist() == kept.tolist()
    assert (allowed is None) == (top_p == 1.0)


def test_special_tokens_have_probability_exactly_zero():
    net, input = model(scale=30.0), torch.randint(0, 99, (4, 32))
    assert net(input).shape[-1] == TOKENIZER.base_vocab_size
    filled = fill_once(net, input, torch.ones(4, 32, dtype=torch.bool), draw_uniforms(0, 0, range(4), (50, 32)))
    assert filled.max() < TOKENIZER.base_vocab_size


def test_a_row_is_sampled_the_same_in_any_batch():
    net, numbers = model(), [4, 9, 2]
    input = torch.randint(0, 96, (3, 32))
    mask = torch.rand(3, 32) < 0.4
    mask[1] = torch.arange(32) < 3  # few masks: padded when batched with the others
    input = input.masked_fill(mask, TOKENIZER.mask_token_id)
    together = fill_once(net, input, mask, draw_uniforms(7, 5, numbers, (6, 32)))
    for i, number in enumerate(numbers):
        alone = fill_once(net, input[i : i + 1], mask[i : i + 1], draw_uniforms(7, 5, [number], (6, 32)))
        assert torch.equal(alone[0], together[i])
        assert torch.equal(alone[0][:, ~mask[i]], input[i][~mask[i]].expand(6, -1)), "what was not masked stays"


def test_fill_in_by_hand():
    position, hidden = masked_positions(torch.tensor([[True, False, True], [False, True, False]]), "cpu")
    text = fill_in(torch.tensor([[9, 5, 9], [4, 9, 6]]), position, hidden, torch.tensor([[[1, 2]], [[3, 7]]]))
    assert text.tolist() == [[[1, 5, 2]], [[4, 3, 6]]]


@pytest.mark.parametrize("temperature", [0.8, "rows"])
@torch.no_grad()
def test_logits_in_parts_fill_in_the_same_tokens(dataset, temperature, monkeypatch):
    (_, input, position, hidden), net = masked_problems(consumer(dataset, config())), model()
    noise = draw_uniforms(0, 0, range(len(input)), (5, 32))
    if temperature == "rows":
        temperature = torch.linspace(0.5, 2.0, len(input))[:, None]
    found, sizes = [], []
    monkeypatch.setattr(net, "project", counted(net.project, sizes))
    for rows in (10**5, 7):
        monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", rows * net.vocabulary)
        found.append(predict_and_sample_tokens(net, input, position, noise, temperature, 0.9, hidden=hidden))
    whole, parts = found
    assert sizes[0] == sum(sizes[1:]) == hidden.sum() and max(sizes[1:]) == 7, "logits are made where tokens are drawn"
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[2].dense(96), parts[2].dense(96))
    torch.testing.assert_close(whole[1], parts[1], rtol=1e-4, atol=1e-4)
    if torch.is_tensor(temperature):
        alone = predict_and_sample_tokens(net, input[:1], position[:1], noise[:1], float(temperature[0]), 0.9)
        assert torch.equal(alone[0] * hidden[0], whole[0][:1])
