"""The gradient of a GRPO step: against loops over tokens, finite differences, and other cuts of the step."""

from dataclasses import replace

import pytest
import torch

from core.distributions import kept_tokens, restrict, sampling_logp
from grpo.losses import ADVANTAGES, OBJECTIVES, compute_advantages, token_weights
from grpo.reference import with_reference
from grpo.rewards import Rewards
from grpo.step_settings import StepSettings
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


@pytest.mark.parametrize("teacher", [None, {}, {"advantage": "gdpo"}],
                         ids=["rewards and k3", "a teacher and exact KL", "likewise with gdpo"])
def test_on_prompts_the_gradient_equals_that_of_every_completion_forwarded_on_its_own(prompts, teacher):
    policy, reference = causal_policy(seed=1), causal_policy(seed=2).frozen()
    c, scorer = prompt_config(kl_beta=0.3, temperature=0.7), length_reward
    if teacher is not None:
        c = config(max_new_tokens=6, temperature=0.7, **TAUGHT, **teacher)
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
            if teacher is None:
                kl = (q[at, token] - logp).exp() - (q[at, token] - logp) - 1
                term = ratio * (-advantage[n] + c.kl_beta * kl)
            total = total + term / length / 16
    loop = gradient_of_loop(policy, total)
    assert loop.norm() > 0.01 and apart(shared, loop) < 1e-5


CUTS = [{"batch_size": 4}, {"batch_size": 1, "gradient_accumulation_steps": 4},
        {"batch_size": 2, "gradient_accumulation_steps": 2}, *({"micro_batch_tokens": x} for x in (1, 110, 10_000))]


@pytest.mark.parametrize("kind, settings", [
    *(("prompts", {"objective": name}) for name in OBJECTIVES), ("prompts", {"ppo_epochs": 2}), ("prompts", TAUGHT),
    *(("fill", {"objective": name, "credit_window": 3}) for name in OBJECTIVES),
    *(("fill", {"advantage": name}) for name in ADVANTAGES)], ids=str)
def test_the_gradient_does_not_depend_on_the_cut(dataset, prompts, kind, settings):
    build, found = fill_policy if kind == "fill" else causal_policy, []
    for cut in CUTS:
        c = config(max_new_tokens=12, **cut, **settings)
        scorer, data = length_reward, prompt_consumer(prompts, c)
        if kind == "fill":
            scorer, data = rewards(c, judge()), consumer(dataset, c)
        found.append(step_gradient(build(seed=1), build(seed=2).frozen(), scorer, data, c))
    assert all(apart(other, found[0]) < 2e-5 for other in found[1:])


@pytest.mark.parametrize("kind, estimator", [("fill", "exact"), ("prompts", "k3")])
def test_the_gradient_passes_finite_differences(dataset, prompts, kind, estimator):
    build, folder = (fill_policy, dataset) if kind == "fill" else (causal_policy, prompts)
    c, reference = config(kl_beta=0.2, objective="plain", max_new_tokens=6), build(seed=2).frozen()
    policy = build(seed=1, scale=4.0)
    settings = replace(StepSettings.of(c, policy), kl_estimator=estimator)
    rollouts = with_reference(sampled(policy, folder, c), reference, settings)
    policy.model.double()
    rollouts.train_mask, rollouts.advantage = rollouts.mask.double(), torch.randn(len(rollouts.target), 1).double()
    weight = token_weights(rollouts.train_mask, "sum", 1)

    def value():
        return loss_of(policy, rollouts, weight, c)[0]

    value().backward()
    for name, p in policy.model.named_parameters():
        direction, h, values = torch.randn_like(p), 1e-6, []
        for way in (h, -2 * h, h):
            values.append(value().detach())
            with torch.no_grad():
                p.add_(way * direction)
        slope, claimed = (values[1] - values[2]) / (2 * h), (p.grad * direction).sum()
        assert abs(claimed) > 1e-6 and abs(slope - claimed) < 1e-4 * abs(claimed) + 1e-7, name
