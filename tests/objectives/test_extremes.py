"""Extreme logits, log ratios, rewards and temperatures: every objective and every KL is finite, with its gradient."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.huggingface.model import BANNED
from grpo.losses import OBJECTIVES, token_weights
from tests.tiny import loss_of
from tests.objectives.tables import MAX_TOKENS, G, M, N, P, Table, V, objective_config, table_rollouts, with_advantage

ESTIMATORS = ["none", "exact", "k2", "k3", "in reward"]
FEW_EXAMPLES = settings(derandomize=True, max_examples=15, deadline=None, database=None)
LOGITS = st.sampled_from(["equal", "one_hot", "far", "banned", "ordinary"])
REWARDS = st.sampled_from(["equal", "far", "tiny", "one", "huge"])
SHIFTS = st.sampled_from([-1e4, -30.0, 0.0, 1e-6, 30.0, 1e4])
TEMPERATURES = st.sampled_from([0.01, 0.1, 1.0, 100.0])


def logits(kind, seed):
    """(N, M, V) float32."""
    noise = torch.randn(N, M, V, generator=torch.Generator().manual_seed(seed))
    one_hot = torch.nn.functional.one_hot(noise.argmax(-1), V).float()
    return {"equal": torch.zeros_like(noise), "one_hot": 1e4 * one_hot, "far": 1e4 * noise.sign(), "ordinary": noise,
            "banned": noise.masked_fill(one_hot > 0, BANNED)}[kind]


def reward(kind):
    """(P, G) float32."""
    noise = torch.randn(P, G, generator=torch.Generator().manual_seed(1))
    one = torch.zeros_like(noise)
    one[0, 0] = 1.0
    return {"equal": torch.ones_like(noise), "far": 1e4 * noise, "tiny": 1e-30 * noise, "one": one,
            "huge": 1e12 * noise}[kind]


@pytest.mark.parametrize("name, estimator", [
    pytest.param(name, estimator, marks=[pytest.mark.slow] * (name != "grpo" and estimator != "k3"))
    for name, estimator in itertools.product(OBJECTIVES, ESTIMATORS)])
def test_loss_gradient_and_metrics_are_finite(name, estimator):
    @given(LOGITS, LOGITS, REWARDS, SHIFTS, TEMPERATURES, st.integers(0, 9))
    @FEW_EXAMPLES
    def finite(kind, ref_kind, reward_kind, shift, temperature, seed):
        policy, c = Table(logits(kind, seed)), objective_config(name, estimator, temperature=temperature,
                                                                entropy_bonus=0.1)
        logp = (policy.logits.detach() / temperature).log_softmax(-1)
        ref = (logits(ref_kind, seed + 100) / temperature).log_softmax(-1)
        _, rollouts, *_ = table_rollouts()
        target = logp.argmax(-1) if kind == "banned" else rollouts.target            # nothing banned is sampled
        old = logp.gather(-1, target[..., None])[..., 0] + shift * (torch.arange(M) % 2 * 2 - 1)
        mask = rollouts.mask.float()
        rollouts = dataclasses.replace(rollouts, target=target, old_logp=old, mask=mask, train_mask=mask)
        rollouts = with_advantage(estimator, rollouts, ref, reward(reward_kind), c)
        assert torch.isfinite(rollouts.advantage).all()
        weight = token_weights(rollouts.train_mask, OBJECTIVES[name].average, MAX_TOKENS)
        loss, sums = loss_of(policy, rollouts, weight, c)
        loss.backward()
        assert estimator in ("none", "in reward") or sums["mean_kl"][0] >= -1e-3
        assert torch.isfinite(policy.logits.grad).all()
        assert all(torch.isfinite(torch.as_tensor(x)) for x, _ in sums.values()), sums

    finite()
