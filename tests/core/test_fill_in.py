"""Fill-in sampling: reported log-probabilities are those of the distribution that tokens are drawn from."""

import pytest
import torch

from core.distributions import draw_uniforms
from core.fill_in import predict_and_sample_tokens
from core.supervised.judge_training import fill_once
from tests.tiny import TOKENIZER, expect_frequencies, model


class TinyVocabulary(torch.nn.Module):
    """A 'model' of 6 tokens whose logits depend on the position alone."""

    def __init__(self):
        super().__init__()
        self.vocabulary, self.logits = 6, 2 * torch.randn(5, 6)

    def states(self, input, position, padding=None):
        return position[..., None]

    def project(self, states):
        return self.logits[states[:, 0]]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
def test_frequencies_match_the_reported_log_probabilities(temperature, top_p):
    draws, net = 20_000, TinyVocabulary()
    position = torch.tensor([[0, 2, 4]])
    noise = draw_uniforms(1, 0, [0], (draws, 5))
    target, logp, allowed = predict_and_sample_tokens(net, torch.zeros(1, 5).long(), position, noise,
                                                      temperature=temperature, top_p=top_p)
    for m, column in enumerate(position[0].tolist()):
        kept = expect_frequencies(target[0, :, m], logp[0, :, m], net.logits[column], temperature, top_p)
        assert top_p == 1.0 or allowed.dense(6)[m].tolist() == kept.tolist()
    assert (allowed is None) == (top_p == 1.0)


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
