"""The texts that each estimator reads, and the tokens that it scores."""

import pytest
import torch

from grpo.grpo_training_step import loss_weights
from grpo.losses import AVERAGES
from grpo.policies import fill_views
from grpo.policies.fill_views import FILL_ESTIMATORS
from tests.tiny import (
    TOKENIZER, config, consumer, count_rows, fill_policy, flat_gradient, masked_problems, one_process, sampled)

MASK = TOKENIZER.mask_token_id


def rollouts_of(dataset, estimator, S=3):
    """(config, policy, rollouts, the problem's (input, position, chosen)) of three problems."""
    c, policy = config(unmask_steps=S, fill_estimator=estimator, batch_size=3), fill_policy()
    return c, policy, sampled(policy, dataset, c), masked_problems(consumer(dataset, c))[1:]


@pytest.mark.parametrize("estimator, texts", [("trajectory", 1 + 2 * 4), ("agrpo", 2 * 4), ("step_merge", 1 + 4),
                                              ("one_step", 1)])
def test_an_estimator_reads_as_many_texts_as_it_says(dataset, estimator, texts):
    c, policy, rollouts, _ = rollouts_of(dataset, estimator)
    rows = count_rows(policy.model)
    policy.states(rollouts)
    assert sum(rows) == texts * c.batch_size and rollouts.inputs["texts"].shape == (3, texts, c.block_size)


def gradient_of(policy, rollouts, average, advantage):
    """Of the sum over tokens of advantage times log-probability, with the weights of the loss."""
    for p in policy.parameters():
        p.grad = None
    weight = loss_weights(rollouts, average, one_process())
    (policy.score(rollouts, 1.0).logp * weight * advantage).sum().backward()
    return flat_gradient(policy)


@pytest.mark.parametrize("S, k", [(3, 1), (4, 3), (2, 5)])
@pytest.mark.parametrize("average", AVERAGES)
def test_the_expected_gradient_of_agrpo_is_that_of_the_trajectory(dataset, monkeypatch, average, S, k):
    settings = {"unmask_steps": S, "batch_size": 2, "group_size": 2}
    c, policy = config(**settings, fill_estimator="agrpo"), fill_policy(scale=8.0)
    monkeypatch.setattr(fill_views, "PASSES_READ", k)
    advantage = torch.tensor([[1.0], [-0.5], [0.3], [2.0]])
    exact = gradient_of(policy, sampled(policy, dataset, config(**settings)), average, advantage)
    starts, found, unequal = 12, 0, 0.0  # the passes change with the start at multiples of 1 / S and k / S alone
    agrpo = FILL_ESTIMATORS["agrpo"]
    for i in range(starts):
        def started(x, start=(i + 0.5) / starts):
            x.uniform[:] = start
            return agrpo(x)

        monkeypatch.setitem(FILL_ESTIMATORS, "agrpo", started)
        one = gradient_of(policy, sampled(policy, dataset, c), average, advantage)
        found, unequal = found + one / starts, unequal + float((one - exact).norm())
    assert (found - exact).norm() < 1e-4 * exact.norm() > 0
    assert (unequal > 0.1 * exact.norm()) == (k < S), "one draw of passes alone is not exact; all passes are"


@pytest.mark.parametrize("S, K", [(3, 1), (4, 2), (5, 3), (3, 3), (3, 7)])
def test_step_merge_reads_each_token_in_the_text_at_the_begin_of_its_segment(dataset, S, K):
    c = config(unmask_steps=S, fill_estimator="step_merge", batch_size=3)
    policy, caught = fill_policy(), []
    merge = FILL_ESTIMATORS["step_merge"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill_views, "PASSES_READ", K)
        patch.setitem(FILL_ESTIMATORS, "step_merge", lambda x: caught.append(x) or merge(x))
        r = sampled(policy, dataset, c)
    x, T, position = caught[0], c.block_size, r.inputs["position"].expand(-1, c.group_size, -1)
    for n, m in r.mask.nonzero().tolist():
        p, g = divmod(n, 4)
        passes = 1 + int(x.turn[p, g][r.mask[n] > 0].max())
        turn = int(x.turn[p, g, m])
        segments = [[s for s in range(passes) if s * K // passes == segment] for segment in range(K)]
        begin, = [segment[0] for segment in segments if turn in segment]
        text, place = divmod(int(position[p, g, m]), T)
        assert torch.equal(r.inputs["texts"][p, text], x.read[p, g, begin]) and r.inputs["texts"][p, text, place] == MASK
    logp = policy.score(r, 1.0).logp
    exact = torch.allclose(logp * r.mask, r.old_logp * r.mask, rtol=0, atol=1e-4)
    assert exact == (K >= S)
