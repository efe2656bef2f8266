"""Filling in masked tokens in one and in several passes: the reported log-probabilities are those that tokens are drawn
with."""

from unittest import mock

import pytest
import torch

from core.distributions import draw_uniforms, kept_tokens, restrict, sampling_logp
from core.fill_in import UNMASK_ORDERS, predict_and_sample_tokens
from core.fill_in_passes import draw_passes, fill_in_passes
from core.supervised.judge_training import fill_in_one_pass
from core.tokenizer import CharTokenizer
from tests.tiny import TOKENIZER, config, consumer, expect_frequencies, masked_problems, model

MASK = TOKENIZER.mask_token_id


def test_a_row_is_filled_in_the_same_in_any_batch():
    net, numbers = model(), [4, 9, 2]
    input = torch.randint(0, 96, (3, 32))
    mask = torch.rand(3, 32) < 0.4
    mask[1] = torch.arange(32) < 3  # few masks: padded when batched with the others
    input = input.masked_fill(mask, MASK)
    together = fill_in_one_pass(net, input, mask, draw_uniforms(7, 5, numbers, (6, 32)))
    for i, number in enumerate(numbers):
        alone = fill_in_one_pass(net, input[i : i + 1], mask[i : i + 1], draw_uniforms(7, 5, [number], (6, 32)))
        assert torch.equal(alone[0], together[i])
        assert torch.equal(alone[0][:, ~mask[i]], input[i][~mask[i]].expand(6, -1)), "what was not masked stays"


@pytest.fixture
def problems(dataset):
    """The texts, the hidden positions and the noise of a batch: 3 problems of 4 completions."""
    batch, input, position, hidden = masked_problems(consumer(dataset, config(batch_size=3)))
    return input, position, hidden, *draw_uniforms(1, 0, batch["number"], (2, 4, 32)).unbind(1)


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


@torch.no_grad()
def test_a_text_without_a_hidden_token_is_not_read(problems):
    (input, position, hidden, noise, _), net = problems, model()
    hidden[1] = False
    with mock.patch.object(net, "states", wraps=net.states) as states:
        target, logp, _ = predict_and_sample_tokens(net, input, position, noise, hidden)
    read, *_ = states.call_args[0]
    assert torch.equal(read, input[[0, 2]]) and not target[1].any() and not logp[1].any()
    assert (logp[[0, 2]] < 0).any(1)[hidden[[0, 2]]].all()


@pytest.mark.parametrize("S", [2, 3, 40])
def test_every_hidden_token_has_its_pass_and_each_is_first_equally_often(S):
    turn = draw_passes(torch.rand(500, 12), torch.arange(12).expand(500, 12) < 10, S, None)
    assert (turn[:, 10:] == -1).all() and turn[:, :10].min() == 0 and turn.max() < S
    counts = [row.bincount(minlength=S) for row in turn[:, :10]]
    assert all(count.max() - count.min() <= 1 for count in counts)
    share = (turn[:, :10] == 0).float().mean(0)
    assert (share - share.mean()).abs().max() < 0.1


@pytest.mark.parametrize("temperature", [0.5, 1.5])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
@torch.no_grad()
def test_tokens_of_one_pass_are_as_frequent_as_reported(temperature, top_p):
    tokenizer = CharTokenizer("abc")
    net, input = model(scale=4.0, tokenizer=tokenizer), torch.full((1, 4), tokenizer.mask_token_id)
    noise, position = draw_uniforms(1, 0, [0], (20_000, 4)), torch.tensor([[0, 3]])
    input[0, 1] = 1
    hidden = torch.ones(1, 2, dtype=torch.bool)
    target, logp, allowed = predict_and_sample_tokens(
        net, input, position, noise, hidden, temperature=temperature, top_p=top_p)
    for m, logits in enumerate(net(input)[0, position[0]]):
        kept = expect_frequencies(target[0, :, m], logp[0, :, m], logits, temperature, top_p)
        assert allowed is None if top_p == 1.0 else allowed.dense(len(logits))[m].tolist() == kept.tolist()


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


def entropy(logp, ids):
    """The order of a config: places of low entropy first."""
    return torch.special.entr(logp.exp()).sum(1, keepdim=True).expand_as(ids)


@pytest.mark.parametrize("order, score", [
    ("confidence", lambda p, drawn: p.gather(1, drawn)),
    pytest.param(entropy, lambda p, drawn: (p * p.log()).sum(1), marks=pytest.mark.slow),
    pytest.param(lambda logp, ids: logp.gather(1, ids), lambda p, drawn: 1 - p.gather(1, drawn),
                 marks=pytest.mark.slow)],
    ids=["confidence", "entropy", "the least likely"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}], ids=str)
@torch.no_grad()
def test_by_confidence_texts_are_as_frequent_as_in_a_loop_of_llada_s_sampler(sampling, order, score, monkeypatch):
    """arXiv 2502.09992: a token that was not kept is drawn anew, and kept are the likeliest at temperature 1, or the
    first in another order of the policy. With the noise of the first pass in all of them the distance is .33."""
    monkeypatch.setitem(UNMASK_ORDERS, "mine", UNMASK_ORDERS.get(order, order))
    tokenizer = CharTokenizer("abc")
    net, mask, N = model(scale=6.0, tokenizer=tokenizer), tokenizer.mask_token_id, 20_000
    noise = draw_uniforms(1, 0, [0], (4, N, 4))
    input, position = torch.tensor([[0, mask, mask, mask]]), torch.tensor([[1, 2, 3]])
    target, *_ = fill_in_passes(net, input, position, torch.ones(1, 3, dtype=torch.bool), noise[:, :3].transpose(0, 1),
                                noise[:, 3], 3, unmask_order="mine", **sampling)
    text, generator = input.repeat(N, 1), torch.Generator().manual_seed(0)
    for _ in range(3):
        logits = net(text).flatten(0, 1)                                             # (4 N, V)
        logp = sampling_logp(logits, sampling.get("temperature", 1.0))
        logp = restrict(logp, kept_tokens(logp, sampling.get("top_p", 1.0)))
        drawn = logp.exp().multinomial(1, generator=generator)                       # (4 N, 1)
        sure = score(logits.softmax(-1), drawn).view(N, 4).masked_fill(text != mask, -torch.inf)
        best = sure.argmax(1, keepdim=True)
        text = text.scatter(1, best, drawn.view(N, 4).gather(1, best))
    V = tokenizer.vocab_size
    number = V ** torch.arange(3)
    found, expected = ((x * number).sum(1).bincount(minlength=V**3) / N for x in (target, text[:, 1:]))
    assert (found - expected).abs().sum() / 2 < 0.03
