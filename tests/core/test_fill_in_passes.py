"""Filling in in several passes: each pass reads the tokens of those before it, and reports their probability."""

import pytest
import torch

from core.distributions import draw_uniforms, restrict, sampling_logp
from core.fill_in_passes import draw_passes, fill_in_passes
from core.tokenizer import CharTokenizer
from core.truncation import kept_tokens
from tests.tiny import TOKENIZER, config, consumer, expect_frequencies, masked_problems, model

MASK = TOKENIZER.mask_token_id


@pytest.fixture
def problems(dataset):
    """The texts, the hidden positions and the noise of a batch: 3 problems of 4 completions."""
    batch, input, position, hidden = masked_problems(consumer(dataset, config(batch_size=3)))
    return input, position, hidden, *draw_uniforms(1, 0, batch["number"], (2, 4, 32)).unbind(1)


@pytest.mark.parametrize("S", [2, 3, 40])
def test_every_hidden_token_has_its_pass_in_random_order(S):
    turn = draw_passes(torch.rand(500, 12), torch.arange(12).expand(500, 12) < 10, S)
    assert (turn[:, 10:] == -1).all() and turn[:, :10].min() == 0 and turn.max() < S
    for row in turn[:5, :10]:
        counts = row.bincount(minlength=S)
        assert counts.max() - counts.min() <= 1
    share = (turn[:, :10] == 0).float().mean(0)
    assert (share - share.mean()).abs().max() < 0.1, "each one comes first equally often"


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}])
@torch.no_grad()
def test_a_pass_reads_the_tokens_of_the_passes_before_it_and_reports_its_own_distribution(problems, truncation):
    (input, position, hidden, *noise), net = problems, model()
    target, logp, turn, read, kept = fill_in_passes(net, input, position, hidden, *noise, 3, **truncation)
    assert len(kept) == 4 * hidden.sum() if truncation else kept is None
    dense = iter(kept.dense(96)) if truncation else None
    for n in range(12):
        p = sampling_logp(net(read[n]))                                              # (3, T, V) of each pass
        text, columns = input[n // 4].clone(), position[n // 4]
        for s in range(3):
            assert torch.equal(read[n, s], text)
            now = turn[n] == s
            text[columns[now]] = target[n, now]
        assert not (text == MASK).any() and not logp[n, ~hidden[n // 4]].any()
        for m in hidden[n // 4].nonzero().flatten().tolist():
            q = p[turn[n, m], columns[m]]                                            # (V,)
            if truncation:
                allowed = next(dense)
                assert torch.equal(allowed, kept_tokens(q, top_k=5)) and allowed[target[n, m]]
                q = restrict(q, allowed)
            assert abs(float(q[target[n, m]] - logp[n, m])) < 1e-4


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (1.5, 0.5)])
@torch.no_grad()
def test_texts_are_as_frequent_as_the_reported_probabilities_of_their_passes(temperature, top_p):
    tokenizer = CharTokenizer("abc")
    net, input = model(scale=4.0, tokenizer=tokenizer), torch.full((1, 2), tokenizer.mask_token_id)
    order, noise = draw_uniforms(1, 0, [0], (2, 10_000, 2)).unbind(1)
    target, logp, turn, *_ = fill_in_passes(net, input, torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool),
                                            noise, order, 2, temperature=temperature, top_p=top_p)

    def expect(rows, text, column):
        expect_frequencies(target[rows, column], logp[rows, column], net(text)[0, column], temperature, top_p)

    for first, second in ((0, 1), (1, 0)):
        begun = turn[:, first] == 0
        expect(begun, input, first)
        for token in target[begun, first].unique():
            text = input.clone()
            text[0, first] = token
            expect(begun & (target[:, first] == token), text, second)


@torch.no_grad()
def test_by_confidence_texts_are_as_frequent_as_with_new_noise_in_each_pass():
    """Against a loop of LLaDA's sampler (arXiv 2502.09992): a token that was not kept is drawn anew. With the noise of
    the first pass in all of them the distance is .33."""
    tokenizer = CharTokenizer("abc")
    net, mask, N = model(scale=6.0, tokenizer=tokenizer), tokenizer.mask_token_id, 20_000
    noise = draw_uniforms(1, 0, [0], (4, N, 4))
    input, position = torch.tensor([[0, mask, mask, mask]]), torch.tensor([[1, 2, 3]])
    target, *_ = fill_in_passes(net, input, position, torch.ones(1, 3, dtype=torch.bool), noise[:, :3].transpose(0, 1),
                                noise[:, 3], 3, by_confidence=True)
    text, generator = input.repeat(N, 1), torch.Generator().manual_seed(0)
    for _ in range(3):
        p = net(text).softmax(-1)                                                    # (N, 4, V)
        drawn = p.flatten(0, 1).multinomial(1, generator=generator).view(N, 4)
        sure = p.gather(2, drawn[..., None])[..., 0].masked_fill(text != mask, -1.0)
        best = sure.argmax(1, keepdim=True)
        text = text.scatter(1, best, drawn.gather(1, best))
    V = tokenizer.vocab_size
    number = V ** torch.arange(3)
    found, expected = ((x * number).sum(1).bincount(minlength=V**3) / N for x in (target, text[:, 1:]))
    assert (found - expected).abs().sum() / 2 < 0.03
