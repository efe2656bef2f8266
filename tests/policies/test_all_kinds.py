"""Noise belongs to the problem, and greedy tokens alone are kept, for policies of all kinds."""

import pytest
import torch

from core.performance.decode import Decoder
from grpo.sampling_settings import SamplingSettings
from tests.tiny import causal_policy, config, consumer, fill_policy, prompt_consumer


@pytest.mark.parametrize("kind", ["fill", "passes", "causal"])
def test_what_is_sampled_does_not_depend_on_how_many_problems_are_sampled_at_once(dataset, prompts, kind):
    c = config(max_new_tokens=7, batch_size=6, top_k=8, unmask_steps=3 if kind == "passes" else 1)
    policy, data = fill_policy(), consumer(dataset, c)
    if kind == "causal":
        policy, data = causal_policy(), prompt_consumer(prompts, c)
    problems, found = data.problems("train", 0), []
    for rows in (None, 1, 19):  # those of all problems, of one, of four
        found.append(policy.sample(problems, 0, SamplingSettings.of(c.varied(sample_rows=rows))))
    for other in found[1:]:
        assert torch.equal(other.mask, found[0].mask) and torch.equal(other.truncated, found[0].truncated)
        assert torch.equal(other.target * other.mask.long(), found[0].target * found[0].mask.long())
        for one, another in zip(other.inputs.kept, found[0].inputs.kept, strict=True):
            assert torch.equal(one.ids, another.ids) and torch.equal(one.counts, another.counts)
        torch.testing.assert_close(other.old_logp * other.mask, found[0].old_logp * found[0].mask, rtol=1e-4, atol=1e-4)
    again = policy.sample(problems, 1, SamplingSettings.of(c))
    assert not torch.equal(again.target, found[0].target), "each step has noise of its own"


@pytest.mark.parametrize("kind", ["fill", "passes", "causal", "decoder"])
def test_of_greedy_completions_each_state_keeps_the_likeliest_token_alone(dataset, prompts, kind):
    c = config(max_new_tokens=7, top_k=1, top_p=0.9, unmask_steps=3 if kind == "passes" else 1)
    policy, data = fill_policy(), consumer(dataset, c)
    if kind in ("causal", "decoder"):
        policy, data = causal_policy(), prompt_consumer(prompts, c)
        policy.decoder = Decoder(policy.model) if kind == "decoder" else None
    rollouts = policy.sample(data.problems("train", 0), 0, SamplingSettings.of(c))
    drawn = rollouts.target.flatten()[rollouts.index()]                              # (K, g)
    for kept, full in zip(rollouts.inputs.kept, policy.distributions(rollouts, 1.0), strict=True):
        assert kept.counts.eq(1).all() and torch.equal(kept.ids.long(), full.argmax(-1))
        now, drawn = drawn.tensor_split([len(full)])
        assert torch.equal(now, full.argmax(-1, keepdim=True).expand_as(now))
    assert len(drawn) == 0 and not rollouts.old_logp.any()
    assert not policy.score(rollouts, c.temperature).logp.any()
