"""The gradient of a GRPO step: against loops over tokens, finite differences, and other cuts of the step."""

import dataclasses

import pytest
import torch

from core.distributions import restrict, sampling_logp
from core.truncation import kept_tokens
from grpo.losses import ADVANTAGES, OBJECTIVES, compute_advantages, token_weights
from grpo.reference import with_reference
from grpo.rewards import Rewards
from grpo.rollout import join, tensors
from tests.tiny import (
    causal_policy,
    clear_gradient,
    config,
    consumer,
    fill_policy,
    flat_gradient,
    judge,
    length_reward,
    loss_of,
    prompt_config,
    prompt_consumer,
    prompt_fill_policy,
    rewards,
    sampled,
    step_gradient,
)

pytestmark = pytest.mark.slow  # it is the number of them that takes the time
TAUGHT = {"teacher_checkpoint": "passed as the reference", "kl_beta": 0.0, "distill_beta": 0.7, "task_type": "fill_in"}


def gradient_of_loop(policy, loss):
    clear_gradient(policy)
    loss.backward()
    return flat_gradient(policy)


def apart(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_gradient_equals_that_of_every_completion_forwarded_on_its_own(dataset, objective):
    c = config(objective=objective, kl_beta=0.3, temperature=0.7, top_p=0.9)
    policy, reference, scorer, data = fill_policy(seed=1), fill_policy(seed=2).frozen(), judge(), consumer(dataset, c)
    shared = step_gradient(policy, reference, rewards(c, scorer), data, c)
    problems, rollouts = data.problems("train", 0), sampled(policy, dataset, c)
    inputs, reward = torch.from_numpy(problems["input"]), rewards(c, scorer)(rollouts).reward[..., None]
    advantage = compute_advantages(reward, OBJECTIVES[objective].advantage).flatten()
    N, loss = len(advantage), 0.0
    for n in range(N):
        i = n // c.group_size
        policy_logits, ref_logits = policy.model(inputs[i : i + 1])[0], reference.model(inputs[i : i + 1])[0]
        hidden = torch.from_numpy(problems["mask"][i]).nonzero().flatten().tolist()
        share = {"sequence": 1 / len(hidden) / N, "constant": 1 / c.block_size / N, "sum": 1 / N,
                 "token": 1 / float(rollouts.mask.sum())}[OBJECTIVES[objective].average]
        for m, where in enumerate(hidden):
            drawn = sampling_logp(policy_logits[where], c.temperature)
            drawn = restrict(drawn, kept_tokens(drawn, c.top_p))[rollouts.target[n, m]]
            p, q = ((logits[where] / c.temperature).log_softmax(-1) for logits in (policy_logits, ref_logits))
            kl = (p.exp() * (p - q)).sum()
            loss = loss + share * (-advantage[n] * drawn + c.kl_beta * kl)
    assert apart(shared, gradient_of_loop(policy, loss)) < 1e-5


@pytest.mark.parametrize("teacher", [False, True], ids=["rewards and k3", "a teacher and exact KL"])
def test_on_prompts_the_gradient_equals_that_of_every_completion_forwarded_on_its_own(prompts, teacher):
    policy, reference = causal_policy(seed=1), causal_policy(seed=2).frozen()
    c, scorer = prompt_config(kl_beta=0.3, temperature=0.7), length_reward
    if teacher:
        c = config(max_new_tokens=6, temperature=0.7, **TAUGHT)
        scorer = Rewards(c)
    data = prompt_consumer(prompts, c)
    shared = step_gradient(policy, reference, scorer, data, c)
    batch, rollouts, total = data.problems("train", 0), sampled(policy, prompts, c), 0.0
    advantage = compute_advantages(length_reward(rollouts).reward[..., None], "group_std").flatten()
    for n in range(len(rollouts.target)):
        prompt, length = batch["record"][n // c.group_size]["tokens"], int(rollouts.mask[n].sum())
        written = rollouts.target[n, :length].tolist()
        text = torch.tensor([prompt + written])
        p, q = ((x.model(text)[0] / c.temperature).log_softmax(-1) for x in (policy, reference))
        for t, token in enumerate(written):
            at = len(prompt) - 1 + t
            logp, ratio = p[at, token], (p[at, token] - p[at, token].detach()).exp()
            term = 0.7 * sum(p[at, v].exp() * (p[at, v] - q[at, v]) for v in range(p.shape[1]))
            if not teacher:
                kl = (q[at, token] - logp).exp() - (q[at, token] - logp) - 1
                term = ratio * (-advantage[n] + c.kl_beta * kl)
            total = total + term / length / 16
    loop = gradient_of_loop(policy, total)
    assert loop.norm() > 0.01 and apart(shared, loop) < 1e-5


def test_the_gradient_passes_finite_differences(dataset):
    c = config(kl_beta=0.2, objective="plain")
    policy, reference = fill_policy(seed=1, scale=4.0), fill_policy(seed=2).frozen()
    policy.model.double(), reference.model.double()
    rollouts = with_reference(sampled(policy, dataset, c), reference, "exact", c)
    rollouts.train_mask, rollouts.advantage = rollouts.mask.double(), torch.randn(len(rollouts.target), 1).double()
    weight = token_weights(rollouts.train_mask, "sum", 1)

    def value():
        return loss_of(policy, rollouts, weight, c)[0]

    value().backward()
    for name, p in policy.model.named_parameters():
        direction, h = torch.randn_like(p), 1e-6
        with torch.no_grad():
            p.add_(h * direction)
            up = value()
            p.sub_(2 * h * direction)
            down = value()
            p.add_(h * direction)
        slope, claimed = (up - down) / (2 * h), (p.grad * direction).sum()
        assert abs(claimed) > 1e-6 and abs(slope - claimed) < 1e-4 * abs(claimed) + 1e-7, name


# The cut of a step

@pytest.mark.parametrize("choice", [
    *({"objective": objective, "credit_window": window} for objective in OBJECTIVES for window in (None, 3)),
    *({"advantage": advantage} for advantage in ADVANTAGES)], ids=str)
def test_the_gradient_does_not_depend_on_the_micro_batch(dataset, choice):
    policy, reference, scorer, found = fill_policy(seed=1), fill_policy(seed=2).frozen(), judge(), []
    for c in (config(batch_size=8, **choice), config(batch_size=2, gradient_accumulation_steps=4, **choice)):
        found.append(step_gradient(policy, reference, rewards(c, scorer), consumer(dataset, c), c))
    assert apart(*found) < 1e-5


CUTS = {"batch_size": [{"batch_size": 4}, {"batch_size": 1, "gradient_accumulation_steps": 4},
                       {"batch_size": 2, "gradient_accumulation_steps": 2}],
        "micro_batch_tokens": [{"micro_batch_tokens": tokens} for tokens in (None, 1, 110, 10_000)]}


@pytest.mark.parametrize("settings", [
    *({"objective": name} for name in OBJECTIVES), {"ppo_epochs": 2}, {"kl_estimator": "exact"}, TAUGHT], ids=str)
@pytest.mark.parametrize("cuts", CUTS)
def test_on_prompts_the_gradient_does_not_depend_on_the_cut(prompts, cuts, settings):
    found, policy, reference = [], causal_policy(seed=1), causal_policy(seed=2).frozen()
    for cut in CUTS[cuts]:
        c = prompt_config(max_new_tokens=12, **cut, **settings)
        found.append(step_gradient(policy, reference, length_reward, prompt_consumer(prompts, c), c))
    assert all(apart(other, found[0]) < 2e-5 for other in found[1:])


@pytest.mark.parametrize("estimator", ["trajectory", "one_step"])
def test_selected_and_joined_rollouts_have_the_scores_that_they_had(dataset, prompts, estimator):
    for build, folder, settings in ((fill_policy, dataset, {"unmask_steps": 3, "fill_estimator": estimator}),
                                    (fill_policy, dataset, {"top_k": 9}), (causal_policy, prompts, {"top_k": 9}),
                                    (prompt_fill_policy, prompts, {"unmask_steps": 2, "fill_estimator": estimator})):
        c, policy = prompt_config(**settings), build(seed=1)
        parts = [with_reference(sampled(policy, folder, c, i), build(seed=2).frozen(), "exact", c) for i in range(3)]
        parts[0], _ = parts[0].select(torch.tensor([3, 1]))
        nothing, _ = parts[1].select(torch.arange(0))
        joined = join([nothing, *[dataclasses.replace(part, texts=None) for part in parts]])
        assert joined.problems == 10 and joined.group_size == 4 and nothing.problems == len(nothing.target) == 0
        found, apart_ = policy.score(joined, 1.0), [policy.score(part, 1.0) for part in parts]
        for name in tensors(found):
            expected = torch.cat([(getattr(x, name) * part.mask).sum(1) for x, part in zip(apart_, parts, strict=True)])
            torch.testing.assert_close((getattr(found, name) * joined.mask).sum(1), expected, rtol=1e-4, atol=1e-4)
