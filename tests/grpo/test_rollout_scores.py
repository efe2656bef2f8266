"""Scores of sampled tokens: equal to the sampler's and to loops, in bounded memory."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from grpo.losses import OBJECTIVES, compute_advantages, token_weights
from grpo.reference import visiting, with_reference
from grpo.policies.policy import Policy
from tests.tiny import (causal_policy, clear_gradient, config, fill_policy, flat_gradient, loss_of, prompt_config,
                        prompt_consumer, sampled)

CPU = torch.device("cpu")


def loss_and_gradient(policy, rollouts, c):
    reward = torch.linspace(-1, 1, len(rollouts.target)).view(c.batch_size, -1, 1).sin()
    advantage = compute_advantages(reward, "group_mean").flatten(0, 1)
    weight = token_weights(rollouts.train_mask, OBJECTIVES["grpo"].average, c.max_new_tokens)
    clear_gradient(policy)
    loss, _ = loss_of(policy, dataclasses.replace(rollouts, advantage=advantage), weight, c)
    loss.backward()
    return loss.detach(), flat_gradient(policy), advantage


def test_the_loss_is_that_of_a_loop_over_completions_and_tokens(prompts):
    policy, reference = causal_policy(seed=1), causal_policy(seed=2).frozen()
    c = prompt_config(kl_beta=0.3, temperature=0.7)
    rollouts = with_reference(sampled(policy, prompts, c), reference, "k3", c)
    loss, gradient, advantage = loss_and_gradient(policy, rollouts, c)
    batch, total = prompt_consumer(prompts, c).problems("train", 0), 0.0
    for n in range(len(rollouts.target)):
        prompt, length = batch["record"][n // c.group_size]["tokens"], int(rollouts.mask[n].sum())
        written = rollouts.target[n, :length].tolist()
        text = torch.tensor([prompt + written])
        logits, ref = (p.model(text)[0] / c.temperature for p in (policy, reference))
        for t, token in enumerate(written):
            logp = logits[len(prompt) - 1 + t].log_softmax(-1)[token]
            ref_logp = ref[len(prompt) - 1 + t].log_softmax(-1)[token]
            kl, ratio = torch.exp(ref_logp - logp) - (ref_logp - logp) - 1, torch.exp(logp - logp.detach())
            total = total + ratio * (-advantage[n, 0] + c.kl_beta * kl) / length / 16
    clear_gradient(policy)
    total.backward()
    loop = flat_gradient(policy)
    assert abs(loss - total) < 1e-5 and (gradient - loop).norm() / loop.norm() < 1e-5


def bound(monkeypatch, numbers):
    """Allows this many numbers in one tensor of logits."""
    monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", numbers)


@pytest.mark.parametrize("kind", ["fill-in", "three passes", "prompts"])
def test_the_reference_pass_of_the_exact_kl_makes_bounded_logits(dataset, prompts, monkeypatch, kind):
    build = causal_policy if kind == "prompts" else fill_policy
    policy, reference = build(seed=1), build(seed=2).frozen()
    c = prompt_config(batch_size=4, temperature=0.8, unmask_steps=3 if kind == "three passes" else 1)
    rollouts = sampled(policy, prompts if kind == "prompts" else dataset, c)
    whole = torch.cat(with_reference(rollouts, reference, "exact", c).inputs["reference"])
    bound(monkeypatch, 1000)
    sizes, project = [], reference.model.project
    reference.model.project = lambda states: (sizes.append(len(states) * reference.vocabulary), project(states))[1]
    parts = torch.cat(with_reference(rollouts, reference, "exact", c).inputs["reference"])
    assert whole.numel() > 3000 and max(sizes) <= 1000 and sum(sizes) == whole.numel(), "nothing is made twice"
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_grad_checkpoint_keeps_the_gradient_and_less_memory(dataset, prompts, causal):
    build, c = causal_policy if causal else fill_policy, prompt_config()
    policy = build(n_layer=3, seed=1)
    rollouts = sampled(policy, prompts if causal else dataset, c)
    gradients, kept = [], []
    for policy.model.grad_checkpoint in (False, True):
        saved = {}

        def pack(x):
            saved[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = (policy.score(rollouts, 1.0).logp * rollouts.mask).sum()
        kept.append(sum(saved.values()))
        clear_gradient(policy)
        loss.backward()
        gradients.append(flat_gradient(policy))
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-7)
    assert kept[1] < 0.7 * kept[0]


class Data:
    def __init__(self, device):
        self.device = torch.device(device)


class Elsewhere(Policy):
    """A policy that waits on another device. Only the CPU is here, so what happens to its one tensor is recorded."""

    device = property(lambda self: self.x.data.device)

    def __init__(self, home, inner=None):
        self.calls, self.data = [], Data(home)
        self.x = SimpleNamespace(data=self.data)
        self.data.to = lambda device, non_blocking: self.calls.append(f"to {device}") or Data(device)
        self.model = SimpleNamespace(parameters=lambda: [self.x], buffers=list)
        if inner is not None:
            self.vocabulary, self.project = inner.vocabulary, inner.project
            self.states = lambda rollouts: self.calls.append(f"states on {self.device}") or inner.states(rollouts)


@pytest.mark.parametrize("estimator", ["exact", "k3"])
def test_a_reference_that_waits_elsewhere_visits_for_as_long_as_it_is_read(dataset, estimator):
    c, reference = config(batch_size=2), Elsewhere("meta", fill_policy(seed=2).frozen())
    rollouts = sampled(fill_policy(), dataset, dataclasses.replace(c, batch_size=4))
    known = with_reference(rollouts, reference, estimator, c)
    assert reference.calls == ["to cpu", "states on cpu", "states on cpu"]
    assert reference.x.data is reference.data, "it is as it was, and nothing was copied back"
    assert ("reference" in known.inputs) == (known.ref_logp is None) == (estimator == "exact")
    with pytest.raises(KeyError), visiting(reference, CPU):
        raise KeyError
    assert reference.x.data is reference.data, "also after an error"
    home = Elsewhere("cpu")
    with visiting(home, CPU):
        assert not home.calls, "one that is at home is not moved"
