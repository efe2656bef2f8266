"""Scores of a large vocabulary: few passes over the logits, and the gradient of the plain formulas."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.distributions import KeptTokens
from core.models import load_model, load_tokenizer
from grpo.policies.policy import ModelPolicy, Policy
from grpo.rollout import Inputs, Rollouts
from tests.families import model_folder
from tests.tiny import CAUSAL, TOKENIZER, causal_model, config, model

P, G, M, T = 3, 4, 5, 0.7


class AtStates(ModelPolicy):
    """Scores given states, of which all completions of a group have the same."""

    def states(self, rollouts):
        return self.h


class Identity(torch.nn.Module, Policy):
    """A user's own policy, whose logits are its states."""
    vocabulary, device = 16, torch.device("cpu")

    def states(self, rollouts):
        return self.h

    def project(self, states):
        return states


def family(name, **adapter):
    def make(folder):
        pytest.importorskip("transformers")
        path = model_folder(folder / name, name)
        return AtStates(load_model(path, adapter=config(**adapter))[0], load_tokenizer(path)), 32
    return make


HEADS = {  # {name: folder -> (policy, width of its states)}
    "own, untied": lambda folder: (AtStates(causal_model(seed=1), CAUSAL), 16),
    "own, tied": lambda folder: (AtStates(model(seed=1, tied=True), TOKENIZER), 16),
    "the states themselves": lambda folder: (Identity(), 16),
    "gemma4": family("gemma4"),  # a soft cap
    "qwen3": family("qwen3"),    # tied, with banned ids
    "bert": family("bert"),      # a layer and a norm before the output matrix
    "adapter": family("llama", lora_rank=2, lora_targets="lm_head,q_proj")}


@pytest.fixture
def head(request, tmp_path):
    """(policy with random states, rollouts): a state predicts a token of G completions, some of them the same."""
    policy, width = HEADS[request.param](tmp_path)
    torch.manual_seed(3)
    chosen = torch.rand(P, 1, M) < 0.8
    K = int(chosen.sum())
    policy.h = torch.randn(K, width, dtype=torch.float64)
    target, ones = torch.randint(policy.vocabulary, (P * G, M)), torch.ones(P * G, M)
    target[1] = target[0]
    for _, p in getattr(policy, "model", policy).named_parameters():
        p.data += 0.05 * torch.randn_like(p)  # half of a new adapter is 0
    return policy, Rollouts(target, ones, ones, ones, ones[:, 0] > 1, M, Inputs(chosen=chosen))


def reference_of(policy, rollouts):
    """Log-probabilities of another policy that bans the same tokens."""
    with torch.no_grad():
        logits = policy.project(policy.h.roll(1, 0))
    return list((logits / T).log_softmax(-1).split(rollouts.inputs.counts()))


def gradients(policy, dtype, loss):
    """The gradients of the states and the trained parameters in this precision."""
    getattr(policy, "model", policy).to(dtype)
    policy.h = policy.h.detach().to(dtype).requires_grad_()
    inputs = policy.h, *(p for p in policy.parameters() if p.requires_grad)
    return torch.autograd.grad(loss(), inputs, allow_unused=True)


@pytest.mark.slow
@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("head", HEADS, indirect=True)
def test_the_gradient_is_that_of_the_plain_formulas(head, with_kl, monkeypatch):
    policy, rollouts = head
    on_logp, on_kl = torch.randn(2, P * G, M, dtype=torch.float64)
    getattr(policy, "model", policy).double()
    if with_kl:
        rollouts.inputs.reference = reference_of(policy, rollouts)
    index = rollouts.index()                                                         # (K, G)

    def plain():
        z = policy.project(policy.h) / T                                             # (K, V)
        logp = z - z.logsumexp(-1, keepdim=True)
        drawn = logp.gather(1, rollouts.target.flatten()[index])                     # (K, G)
        loss = (drawn * on_logp.flatten()[index]).sum()
        if with_kl:
            kl = (logp.exp() * (logp - torch.cat(rollouts.inputs.reference))).sum(-1, keepdim=True)
            loss = loss + (kl * on_kl.flatten()[index]).sum()
        return loss

    def scored():
        scores = policy.score(rollouts, T)
        assert not scores.entropy.requires_grad and (scores.kl is not None) == with_kl
        loss = (scores.logp * on_logp).sum()
        if with_kl:
            loss = loss + (scores.kl * on_kl).sum()
        return loss

    expected = gradients(policy, torch.float64, plain)
    assert expected[0].norm() > 0.1
    monkeypatch.setattr("grpo.policies.policy.LARGE_VOCABULARY", 2)
    V, whole = policy.vocabulary, 2**25
    for weights, products, at_once, most in [
            (torch.float64, torch.float32, whole, 1e-12), (torch.float64, torch.float32, 3 * V, 1e-12),
            (torch.float32, torch.float32, whole, 2e-5), (torch.float32, torch.bfloat16, 3 * V, 3e-2)]:
        monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", at_once)
        policy.dtype, before = products, policy.h.detach().to(weights)
        found = gradients(policy, weights, scored)
        for x, y in zip(found, expected, strict=True):
            assert (x is None) == (y is None)
            assert x is None or (x - y).norm() <= most * y.norm(), (weights, products, at_once)
        assert torch.equal(policy.h, before), "project may return a tensor that others read"


class Passes(TorchDispatchMode):
    """Counts the numbers of tensors (rows, V) that are read and written, but by gather and scatter."""

    def __init__(self, V, width):
        super().__init__()
        self.V, self.width, self.count = V, width, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        returned = [x.alias_info for x in function._schema.returns]
        is_view = any(x is not None and not x.is_write for x in returned)
        if is_view or "gather" in function._schema.name or "scatter" in function._schema.name:
            return out
        for x in tree_leaves((args, kwargs, out)):
            if torch.is_tensor(x) and x.dim() == 2 and self.V in x.shape and self.width not in x.shape:
                self.count += x.numel()
        return out


@pytest.mark.slow
@pytest.mark.parametrize("head", ["own, untied"], indirect=True)
@pytest.mark.parametrize("with_kl, in_parts, most", [(False, False, 17), (False, True, 22), (True, False, 36),
                                                     (True, True, 50)])
def test_the_logits_are_passed_over_few_times(head, with_kl, in_parts, most, monkeypatch):
    policy, rollouts = head
    policy.h, K, V = policy.h.float().requires_grad_(), len(policy.h), policy.vocabulary
    if with_kl:
        rollouts.inputs.reference = reference_of(policy, rollouts)
    monkeypatch.setattr("core.distributions.LOGITS_AT_ONCE", 3 * V if in_parts else 2**25)
    found, values = [], []
    for large in (2, 10**9):
        monkeypatch.setattr("grpo.policies.policy.LARGE_VOCABULARY", large)
        with Passes(V, policy.h.shape[1]) as passes:
            scores = policy.score(rollouts, T)
            loss = scores.logp.sum() + (scores.kl.sum() if with_kl else 0)
            loss.backward()
        found.append(passes.count / K / V)
        values.append(torch.stack([scores.logp, scores.entropy, *([scores.kl] if with_kl else [])]))
    assert round(found[0]) <= most and found[0] < 0.8 * found[1]
    assert torch.equal(*values), "the formulas one by one"


@pytest.mark.parametrize("head", ["own, untied"], indirect=True)
@pytest.mark.parametrize("truncated, learn_entropy", [(True, False), (False, True)])
def test_kept_tokens_and_a_learned_entropy_change_no_bit_in_a_large_vocabulary(head, truncated, learn_entropy,
                                                                               monkeypatch):
    policy, rollouts = head
    policy.model.float()
    K, V, found = len(policy.h), policy.vocabulary, []
    if truncated:
        kept = (torch.rand(K, V) < 0.5).scatter(1, rollouts.target.flatten()[rollouts.index()], True)
        rollouts.inputs.kept = KeptTokens.of(kept).split(rollouts.inputs.counts())

    def loss():
        scores = policy.score(rollouts, T, learn_entropy)
        found.append(scores.logp.detach())
        return scores.logp.square().sum() + (scores.entropy.square().sum() if learn_entropy else 0)

    for large in (2, 10**9):
        monkeypatch.setattr("grpo.policies.policy.LARGE_VOCABULARY", large)
        found += filter(torch.is_tensor, gradients(policy, torch.float32, loss))
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:])) and half > 2
