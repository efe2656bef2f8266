"""What all kinds of policies do alike: noise that belongs to the problem, frozen copies, precision."""

import random

import numpy as np
import pytest
import torch

from core.models import freeze_in
from core.optim import build_optimizers
from tests.tiny import (
    causal_policy,
    config,
    consumer,
    fill_policy,
    grpo_step,
    length_reward,
    prompt_consumer,
    same,
    sampled,
)

KINDS = ("fill", "passes", "causal")


def build(kind, **settings):
    return causal_policy(**settings) if kind == "causal" else fill_policy(**settings)


def settings(kind, **changes):
    base = {"max_new_tokens": 7, "batch_size": 3, "group_size": 4, "unmask_steps": 3 if kind == "passes" else 1}
    return config(**base | changes)


@pytest.fixture
def sample(dataset, prompts):
    """sample(policy, kind, number, ...): rollouts of the problems of a step."""
    def rollouts(policy, kind, number=0, **changes):
        return sampled(policy, prompts if kind == "causal" else dataset, settings(kind, **changes), number)
    return rollouts


@pytest.fixture
def first_problems(dataset, prompts):
    """first_problems(kind, c): the problems of the first step."""
    def problems(kind, c):
        data = prompt_consumer(prompts, c) if kind == "causal" else consumer(dataset, c)
        return data.problems("train", 0)
    return problems


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sampled_does_not_depend_on_how_many_problems_are_sampled_at_once(first_problems, kind):
    policy, c = build(kind), settings(kind, batch_size=6, top_k=8)
    problems, found = first_problems(kind, c), []
    for rows in (None, 1, 19):  # those of all problems, of one, of four
        found.append(policy.sample(problems, 0, settings(kind, batch_size=6, sample_rows=rows, top_k=8)))
    for other in found[1:]:
        assert torch.equal(other.mask, found[0].mask) and torch.equal(other.truncated, found[0].truncated)
        assert torch.equal(other.target * other.mask.long(), found[0].target * found[0].mask.long())
        for one, another in zip(other.inputs["kept"], found[0].inputs["kept"], strict=True):
            assert torch.equal(one.ids, another.ids) and torch.equal(one.counts, another.counts)
        torch.testing.assert_close(other.old_logp * other.mask, found[0].old_logp * found[0].mask, rtol=1e-4, atol=1e-4)
    again = policy.sample(problems, 1, c)
    assert not torch.equal(again.target, found[0].target), "each step has noise of its own"


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_policy_is_a_copy_that_does_not_move(sample, kind):
    policy = build(kind)
    reference = policy.frozen()
    assert same(policy, reference) and type(reference) is type(policy)
    assert not any(p.requires_grad for p in reference.parameters())
    assert all(p.requires_grad for p in policy.parameters())
    rollouts, before = sample(policy, kind), {name: x.clone() for name, x in policy.weights().items()}
    scores = reference.score(rollouts, 1.0).logp
    policy.score(rollouts, 1.0).logp.sum().backward()
    for optimizer in build_optimizers(policy, config()):
        optimizer.step()
    assert not same(policy, reference)
    assert all(torch.equal(x, before[name]) for name, x in reference.weights().items())
    assert torch.equal(reference.score(rollouts, 1.0).logp, scores)
    reference.load_weights(policy.weights())
    assert same(policy, reference), "an EMA or periodic reference takes weights over"


@pytest.mark.parametrize("kind", ["fill", "causal"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_frozen_policy_whose_matrices_are_in_bfloat16_scores_what_it_scored(sample, kind, tied):
    policy = build(kind, tied=tied)
    policy.dtype = torch.bfloat16
    reference, rollouts = policy.frozen(), sample(policy, kind)
    freeze_in(torch.bfloat16, reference.model)
    kinds = {name: {x.dtype for x in group} for name, group in reference.parameters_by_kind().items()}
    held = [p.dtype == torch.bfloat16 for p in reference.parameters()]
    assert kinds["matrices"] == {torch.bfloat16} and kinds["vectors"] == {torch.float32} and sum(held) == 4 + (not tied)
    for _ in range(2):
        assert torch.equal(reference.score(rollouts, 1.0).logp, policy.score(rollouts, 1.0).logp)
        for p in policy.parameters():
            p.data.mul_(1.1)
        reference.load_weights(policy.weights())  # as reference_mode='periodic' does
    assert held == [p.dtype == torch.bfloat16 for p in reference.parameters()]


def test_a_step_leaves_the_global_random_states_alone(dataset, prompts):
    def states():
        return [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]

    of_texts, of_prompts = settings("passes"), settings("causal")
    runs = [(fill_policy(dropout=0.5), of_texts, consumer(dataset, of_texts)),
            (causal_policy(dropout=0.5), of_prompts, prompt_consumer(prompts, of_prompts))]
    before = states()
    for policy, c, data in runs:
        grpo_step(policy, policy.frozen(), length_reward, data, c)
    assert states() == before
