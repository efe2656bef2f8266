"""The reference and how it moves."""

import pytest
import torch

from core.models import load_model
from grpo.policies.causal import CausalPolicy
from grpo.reference import REFERENCES, ema, needs_reference, periodic, static
from tests.families import model_folder
from tests.tiny import config, fill_policy, same


def test_an_ema_reference_follows_by_its_formula():
    policy, reference = fill_policy(seed=1), fill_policy(seed=2).frozen()
    before = [p.clone() for p in reference.parameters()]
    ema(reference, policy, 1, config(reference_mode="ema", ema_alpha=0.9))
    for old, new, p in zip(before, reference.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(new, 0.9 * old + 0.1 * p)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "llama"])
def test_an_ema_reference_follows_once_where_input_and_output_share_a_matrix(family, tmp_path):
    pytest.importorskip("transformers")
    model, tokenizer = load_model(model_folder(tmp_path / family, family))
    policy = CausalPolicy(model, tokenizer)
    reference = policy.frozen()
    before = {name: x.clone() for name, x in reference.weights().items()}
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    ema(reference, policy, 1, config(reference_mode="ema", ema_alpha=0.9))
    for name, x in reference.weights().items():
        torch.testing.assert_close(x, before[name] + 0.1, rtol=1e-4, atol=1e-5)


def test_a_periodic_reference_becomes_the_policy_when_its_time_comes():
    policy, reference, before = fill_policy(seed=1), fill_policy(seed=2).frozen(), fill_policy(seed=2)
    c = config(reference_mode="periodic", reference_update_freq=3)
    for iteration in (1, 2):
        periodic(reference, policy, iteration, c)
        assert same(reference, before)
    periodic(reference, policy, 3, c)
    assert same(reference, policy) and not any(p.requires_grad for p in reference.parameters())


def test_a_static_reference_stays():
    policy, reference = fill_policy(seed=1), fill_policy(seed=2).frozen()
    for iteration in range(3):
        static(reference, policy, iteration, config())
    assert same(reference, fill_policy(seed=2))


def test_a_reference_is_needed_only_with_a_penalty():
    for mode in REFERENCES:
        assert not needs_reference(config(kl_beta=0.0, reference_mode=mode))
        assert mode == "none" or needs_reference(config(kl_beta=0.1, reference_mode=mode))
