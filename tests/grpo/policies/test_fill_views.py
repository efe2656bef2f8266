"""The texts that each estimator reads, and the tokens that it scores."""

import pytest
import torch

from grpo.grpo_training_step import compute_rollout_advantages
from grpo.policies.fill_views import FILL_ESTIMATORS, PROMPT_MASKED, Written
from grpo.rewards import Scored
from tests.tiny import TOKENIZER, config, consumer, count_rows, fill_policy, masked_problems, one_process, sampled

MASK = TOKENIZER.mask_token_id


def rollouts_of(dataset, estimator, S=3):
    """(config, policy, rollouts, the problem's (input, position, chosen)) of three problems."""
    c, policy = config(unmask_steps=S, fill_estimator=estimator, batch_size=3), fill_policy()
    return c, policy, sampled(policy, dataset, c), masked_problems(consumer(dataset, c))[1:]


@pytest.mark.parametrize("estimator, texts", [("trajectory", 1 + 2 * 4), ("one_step", 1), ("prompt_mask", 1),
                                              ("random_mask", 4), ("coupled", 2 * 4)])
def test_an_estimator_reads_as_many_texts_as_it_says(dataset, estimator, texts):
    c, policy, rollouts, _ = rollouts_of(dataset, estimator)
    rows = count_rows(policy.model)
    policy.states(rollouts.reading)
    assert sum(rows) == texts * c.batch_size and rollouts.reading.texts.shape == (3, texts, c.block_size)


def test_trajectory_reads_the_text_of_each_pass(dataset):
    c, _, r, (input, position, chosen) = rollouts_of(dataset, "trajectory")
    T, texts = c.block_size, r.reading.texts
    assert torch.equal(texts[:, 0], input)
    for n in range(len(r.target)):
        p, g = divmod(n, 4)
        for m in range(r.target.shape[1]):
            if chosen[p, m]:
                view, place = divmod(int(r.reading.position[p, g, m]), T)
                read, whole = texts[p, view], r.texts.tokens[n]
                assert place == position[p, m] and read[place] == MASK
                hidden = read == MASK
                assert torch.equal(read[~hidden], whole[~hidden]), "what it does not hide is the completed text"
                assert view == 0 or (view - 1) // 2 == g, "a later text is of the completion itself"


def test_coupled_reads_every_token_hidden_exactly_once(dataset):
    c, _, r, (_, position, chosen) = rollouts_of(dataset, "coupled")
    T = c.block_size
    for n in range(len(r.target)):
        p, g = divmod(n, 4)
        first, second = r.reading.texts[p, 2 * g], r.reading.texts[p, 2 * g + 1]
        hidden = position[p][chosen[p] > 0]
        assert ((first[hidden] == MASK) != (second[hidden] == MASK)).all()
        for m, place in enumerate(hidden):
            view, where = divmod(int(r.reading.position[p, g, m]), T)
            assert where == place and (first, second)[view - 2 * g][place] == MASK
            assert (second, first)[view - 2 * g][place] == r.texts.tokens[n][place]
    assert torch.equal(r.mask, chosen.repeat_interleave(4, 0)) and torch.equal(r.train_mask, r.mask)


def test_random_mask_scores_the_tokens_that_it_hides_and_nothing_else(dataset):
    c, _, r, (_, _, chosen) = rollouts_of(dataset, "random_mask")
    shares = []
    for n in range(len(r.target)):
        p, g = divmod(n, 4)
        hidden = (r.reading.texts[p, g] == MASK).nonzero().flatten().tolist()
        places = r.reading.position[p, g] - g * c.block_size
        assert sorted(places[r.train_mask[n] > 0].tolist()) == hidden and hidden
        shares.append(len(hidden) / int(chosen[p].sum()))
    assert min(shares) < 0.4 and max(shares) > 0.6
    assert torch.equal(r.mask, chosen.repeat_interleave(4, 0)), "all sampled tokens are counted"
    reward = torch.rand(3, 4)
    advanced = compute_rollout_advantages(r, Scored(reward, reward[..., None]), c, one_process())
    assert torch.equal(advanced.train_mask, r.train_mask) and torch.equal(advanced.mask, r.mask)
    assert (r.train_mask <= r.mask).all() and r.train_mask.sum() < r.mask.sum()


def test_prompt_mask_hides_a_part_of_the_visible_text_for_the_whole_group(dataset):
    _, _, r, (input, _, _) = rollouts_of(dataset, "prompt_mask")
    visible, texts = input != MASK, r.reading.texts[:, 0]
    share = float(((texts == MASK) & visible).sum() / visible.sum())
    assert texts.shape == input.shape and 0.3 * PROMPT_MASKED < share < 2 * PROMPT_MASKED
    assert torch.equal(texts[texts != MASK], input[texts != MASK]) and (texts[~visible] == MASK).all()


def written(seed, chosen):
    """A batch of completions over which noise is drawn again and again; chosen: (P, M)."""
    P, M, G, T = *chosen.shape, 50, 12
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(M).expand(P * G, M)
    text = torch.randint(0, 96, (P * G, T), generator=generator)
    return Written(torch.full((P, T), MASK), text, place, chosen.repeat_interleave(G, 0), torch.zeros(P * G, M).long(),
                   text[:, None], torch.rand(P, 2, G, T, generator=generator), MASK)


def test_every_token_is_hidden_again_equally_often_and_padding_never():
    chosen = torch.ones(40, 8)
    chosen[:, 6:] = 0.0
    w = written(0, chosen)
    share = w.random_share()                                                         # (N, M)
    assert not share[:, 6:].any() and share[:, :6].any(1).all(), "at least one token of each completion"
    often = share[:, :6].float().mean(0)
    assert (often - often.mean()).abs().max() < 0.05
    # The chance t is uniform: the number of hidden tokens is nearly so (all or none: a seventh each, none becomes one)
    counts = torch.bincount(share.sum(1), minlength=7)[1:7] / len(share)
    expected = torch.tensor([2.0, 1, 1, 1, 1, 1]) / 7
    assert (counts - expected).abs().max() < 0.05
    hidden = w.masked_again(share)
    for row, text, marks in zip(hidden[:50], w.text, share, strict=False):
        assert [i for i in range(12) if row[i] == MASK] == marks.nonzero().flatten().tolist()
        assert torch.equal(row[row != MASK], text[row != MASK])


@pytest.mark.parametrize("name", FILL_ESTIMATORS)
def test_a_view_of_one_pass_reads_each_hidden_token_hidden(name):
    chosen = torch.ones(3, 8)
    w = written(1, chosen)
    w.read = w.input.repeat_interleave(50, 0)[:, None]
    view = FILL_ESTIMATORS[name](w)
    T, rows = 12, view.position.shape[1]
    for p in range(3):
        for g in range(0, 50, 7):
            for m in range(8):
                text, place = divmod(int(view.position[p, g if rows > 1 else 0, m]), T)
                assert place == w.place[50 * p + g, m]
                if view.train_mask is None or view.train_mask[50 * p + g, m]:
                    assert view.texts[p, text, place] == MASK
