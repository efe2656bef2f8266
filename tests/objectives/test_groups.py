"""Groups, completions and tokens that a GRPO step replaces, leaves out or weights."""

import copy
from dataclasses import replace

import pytest
import torch

from core.optim import build_optimizers
from grpo.grpo_training_step import with_advantage
from grpo.losses import kl_as_reward, token_weights
from grpo.rewards import Scored
from grpo.shaping import MOST_RESAMPLES
from tests.tiny import (
    causal_policy,
    collect,
    config,
    consumer,
    count_rows,
    fill_policy,
    fixed_rewards,
    grpo_step,
    one_process,
    optimizer_state,
    pairs,
    prompt_config,
    prompt_consumer,
    sampled,
    shaped,
    train,
)


def equal_rewards_in(groups):
    """A rewards object: all equal in these groups of an iteration's own four problems, and different in all others."""
    def reward(rollouts):
        r = torch.rand(rollouts.problems, 4)
        if rollouts.problems == 4:
            r[groups] = 0.5
        return Scored(r)
    return reward


def test_groups_of_equal_rewards_are_counted_and_cost_no_backward(dataset):
    c, policy = config(kl_beta=0.0), fill_policy()
    rows, fixed, data = count_rows(policy.model), torch.rand(4, 4), consumer(dataset, c)
    fixed[0], fixed[2] = 0.5, 0.25
    metrics = grpo_step(policy, None, fixed_rewards(fixed), data, c)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert sum(rows) == 4 + 2, "sampling reads all inputs, training the other half"
    assert "mean_kl" not in metrics


def test_groups_of_equal_rewards_are_dropped_from_the_normaliser(dataset):
    c, policy = config(zero_std="drop", kl_beta=0.0), fill_policy(seed=1, scale=3.0)
    dropped, sums = collect(policy, equal_rewards_in([1, 2]), consumer(dataset, c), c)
    assert dropped.problems == 2 and pairs(sums)["frac_reward_zero_std"] == (2, 4)
    share = dropped.mask / dropped.mask.sum(1, keepdim=True) / 8
    torch.testing.assert_close(token_weights(dropped.train_mask, "sequence", 1), share)


def test_groups_of_equal_rewards_are_replaced_by_other_problems(dataset):
    c, policy = config(zero_std="resample", kl_beta=0.0), fill_policy(seed=1, scale=3.0)
    data = consumer(dataset, c)
    rollouts, sums = collect(policy, equal_rewards_in([0, 2]), data, c)
    texts = rollouts.inputs.texts[:, 0]
    assert rollouts.problems == 4 and pairs(sums)["resampled"] == (2, 4)
    first, spare = (torch.from_numpy(data.problems("train", 0, again)["input"]) for again in (0, 1))
    assert torch.equal(texts, torch.cat((first[[1, 3]], spare[:2])))
    assert (rollouts.advantage.view(4, 4).abs().sum(1) > 0).all()


def test_resampling_is_bounded_and_groups_that_are_left_are_dropped(prompts):
    c = prompt_config(zero_std="resample", kl_beta=0.0)
    calls, policy, data = [], causal_policy(), prompt_consumer(prompts, c)

    def equal(rollouts):
        calls.append(rollouts.problems)
        return Scored(torch.full((rollouts.problems, 4), 0.5))

    rollouts, sums = collect(policy, equal, data, c)
    assert calls == [4] * (1 + MOST_RESAMPLES) and pairs(sums)["resampled"] == (4 * MOST_RESAMPLES, 4)
    assert rollouts.problems == 0
    metrics = train(policy, rollouts, sums, c)
    assert metrics["grad_norm"] == 0 and metrics["frac_reward_zero_std"] == 1 and metrics["empty_steps"] == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("more, empty", [
    ({}, True), ({"zero_std": "resample"}, True), ({"kl_beta": 0.1, "kl_in_reward": True}, False),
    ({"kl_beta": 0.1}, False), ({"entropy_bonus": 0.1}, False)], ids=str)
def test_a_step_of_equal_rewards_moves_nothing_unless_kl_or_entropy_have_a_gradient(dataset, more, empty, optimizer):
    """Where the gradient is exactly zero, momentum and weight decay would move the weights by themselves."""
    c = config(**{"kl_beta": 0.0, "weight_decay": 0.1, "optimizer": optimizer} | more)
    policy, data = fill_policy(seed=1, scale=3.0), consumer(dataset, c)
    reference, optimizers = fill_policy(seed=2).frozen() if c.kl_beta else None, build_optimizers(policy, c)
    for number, rewards in enumerate((torch.rand(4, 4), torch.ones(4, 4), torch.rand(4, 4))):
        before, state = copy.deepcopy(policy.weights()), optimizer_state(optimizers)
        metrics = grpo_step(policy, reference, fixed_rewards(rewards), data, c, number, optimizers)
        stays = empty and number == 1
        assert metrics["empty_steps"] == stays and metrics["skipped_steps"] == 0
        assert all(torch.equal(x, before[name]) for name, x in policy.weights().items()) == stays
        assert not stays or all(map(torch.equal, optimizer_state(optimizers), state))


# Tokens and completions that are left out

def test_the_train_mask_is_not_the_mask(prompts):
    """Skipped and truncated completions were sampled all the same."""
    rollouts = sampled(causal_policy(scale=1.0), prompts, config(max_new_tokens=30))
    reward = torch.rand(4, 4)
    reward[0, 1], reward[2] = torch.nan, torch.nan
    for masked in (False, True):
        shape = shaped(rollouts, Scored(reward), config(mask_truncated=masked))
        trained = with_advantage(*shape, "step", one_process())
        assert torch.equal(trained.mask, rollouts.mask) and 0 < rollouts.truncated.sum() < 16
        for n in range(16):
            left_out = reward.flatten()[n].isnan() or masked and rollouts.truncated[n]
            assert torch.equal(trained.train_mask[n], rollouts.mask[n] * (0.0 if left_out else 1.0))


def test_equal_completions_get_equal_penalties_for_their_kl_and_others_their_own(prompts):
    """Rows that left the batch at different times differ in the last bits of their log-probabilities."""
    c = config(kl_beta=0.5, kl_in_reward=True, max_new_tokens=6, advantage="group_std")
    rollouts = sampled(causal_policy(), prompts, c)
    first = torch.arange(16) // 4 * 4
    first[3::4] += 3  # the last one of each group stays another
    logp, mask = rollouts.old_logp[first], rollouts.mask[first]
    noise = 1e-6 * torch.randn_like(logp)
    alike = replace(rollouts, target=rollouts.target[first], mask=mask, train_mask=mask, old_logp=logp + noise,
                    ref_logp=logp - 0.1)
    _, scored = shaped(alike, Scored(torch.ones(4, 4)), c)
    exact = kl_as_reward(alike, 0.5).sum(1).view(4, 4)
    penalty = scored.penalty[..., 0]
    for group, targets in enumerate(alike.target.view(4, 4, -1).tolist()):
        firsts = [targets.index(target) for target in targets]
        assert penalty[group].tolist() == exact[group, firsts].tolist() and firsts[:3] == [0, 0, 0]
    assert (scored.values["kl"].view(4, 4) == penalty).all()


def test_the_overlong_penalty_is_in_the_credit_and_not_in_the_reward(prompts):
    c, reward = config(overlong_buffer=4, max_new_tokens=6, kl_beta=0.0), torch.rand(4, 4)
    rollouts = sampled(causal_policy(), prompts, c)
    _, scored = shaped(rollouts, Scored(reward), c)
    lengths = rollouts.mask.sum(1).tolist()
    penalty = torch.tensor([min(0.0, (6 - 4 - n) / 4) for n in lengths])
    assert torch.equal(scored.reward, reward) and len(set(lengths)) > 1
    torch.testing.assert_close(scored.penalty.flatten(), penalty)
    torch.testing.assert_close(scored.values["overlong"], penalty)
