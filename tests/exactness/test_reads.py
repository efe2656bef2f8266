"""Nothing is read twice or padded in vain, with the numbers of the plain way; logits need bounded memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from grpo.policies import causal
from grpo.policies.causal import CausalInputs, CausalPolicy
from grpo.reference import with_reference
from grpo.rollout import Rollouts
from grpo.step_settings import StepSettings
from tests.tiny import (
    CAUSAL,
    causal_model,
    causal_policy,
    clear_gradient,
    config,
    consumer,
    count_rows,
    fill_policy,
    flat_gradient,
    grpo_step,
    judge,
    prompt_config,
    rewards,
    sampled,
)


def test_each_distinct_input_is_read_once(dataset):
    c, policy, scorer = config(group_size=6), fill_policy(), judge()
    reference = fill_policy(seed=2).frozen()
    rows, reference_rows, judge_rows = map(count_rows, (policy.model, reference.model, scorer))
    grpo_step(policy, reference, rewards(c, scorer), consumer(dataset, c), c)
    assert sum(rows) == 2 * c.batch_size, "once to sample, once to train: not once per completion"
    assert sum(reference_rows) == c.batch_size
    assert sum(judge_rows) == c.batch_size * c.group_size


def unequal_rollouts(seed=1):
    """Rollouts of prompts of 2 to 10 tokens with completions of 1 to 7."""
    rng, (P, G, M, T) = np.random.default_rng(seed), (5, 4, 7, 9)
    length = torch.from_numpy(rng.integers(1, M + 1, (P, G)))
    prompt_length = torch.from_numpy(rng.integers(1, T + 1, P))
    prompt_length[0] = T

    def ids(*shape):
        return torch.from_numpy(rng.integers(0, CAUSAL.base_vocab_size, shape))

    inputs = CausalInputs(
        ids(P, T), prompt_length, ids(P, G, M),
        chosen=torch.arange(M) < length[..., None])
    mask, target = inputs.chosen.flatten(0, 1).float(), ids(P * G, M)
    return Rollouts(target, mask, mask, torch.zeros(P * G, M), torch.zeros(P * G, dtype=torch.bool), M, inputs)


class WithoutCache(CausalPolicy):
    """Reads the prompt again with each completion, all of them padded to the longest."""

    def states(self, rollouts):
        x, G = rollouts.inputs, rollouts.group_size
        T = x.prompt.shape[1]
        prompt, padding = x.prompt.flip(1).repeat_interleave(G, 0), (T - x.prompt_length).repeat_interleave(G)
        h = self.model.states(torch.cat((prompt, x.tokens.flatten(0, 1)), 1), padding=padding)[:, T:]
        return h[x.chosen.flatten(0, 1)]


@pytest.mark.parametrize("overhead", [1, 8])
@pytest.mark.parametrize("again", [False, True])
def test_reading_prompts_once_and_like_lengths_together_gives_the_gradient_of_padded_rows(monkeypatch, overhead, again):
    monkeypatch.setattr(causal, "PART_TOKENS", overhead)
    net, rollouts, found, read = causal_model(seed=1).double(), unequal_rollouts(), [], []
    weight = torch.rand(rollouts.target.shape, dtype=torch.float64) * rollouts.mask
    net.embed.register_forward_hook(lambda module, args, out: read.append(args[0].numel()))
    policy = CausalPolicy(net, CAUSAL, grad_checkpoint=again)
    for each in (policy, WithoutCache(net, CAUSAL, grad_checkpoint=again)):
        clear_gradient(policy), read.append("forwards")
        scores = each.score(rollouts, 0.7, learn_entropy=True)
        ((scores.logp + 0.1 * scores.entropy) * weight).sum().backward()
        found.append((scores.logp.detach(), flat_gradient(policy)))
    # Less padding moves a prompt to other positions, and the rotary table is in float32
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-6)
    assert (found[0][1] - found[1][1]).norm() < 1e-6 * found[1][1].norm()
    second = read.index("forwards", 1)
    once, alone = read[1:second], read[second + 1 :]
    assert len(once) == policy.calls(rollouts) > len(alone) == 1 and sum(once) < 0.5 * sum(alone)


@pytest.mark.parametrize("kind", ["fill-in", "three passes", "prompts"])
def test_the_reference_pass_of_the_exact_kl_makes_bounded_logits(dataset, prompts, monkeypatch, kind):
    build = causal_policy if kind == "prompts" else fill_policy
    policy, reference = build(seed=1), build(seed=2).frozen()
    c = prompt_config(batch_size=4, temperature=0.8, unmask_steps=3 if kind == "three passes" else 1)
    rollouts = sampled(policy, prompts if kind == "prompts" else dataset, c)
    settings = replace(StepSettings.of(c, policy), kl_estimator="exact")
    whole = torch.cat(with_reference(rollouts, reference, settings).inputs.reference)
    monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", 1000)
    sizes, project = [], reference.model.project
    reference.model.project = lambda states: (sizes.append(len(states) * reference.vocabulary), project(states))[1]
    parts = torch.cat(with_reference(rollouts, reference, settings).inputs.reference)
    assert whole.numel() > 3000 and max(sizes) <= 1000 and sum(sizes) == whole.numel(), "nothing is made twice"
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
