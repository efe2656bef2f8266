"""The causal policy: where its completions end, and the stop token, which is trained."""

from dataclasses import replace

import numpy as np
import torch

from core.optim import build_optimizers
from core.tokenizer import CharTokenizer
from grpo.policies.causal import CausalPolicy
from grpo.rewards import Scored
from grpo.sampling_settings import SamplingSettings
from tests.tiny import (
    CAUSAL, causal_model, causal_policy, grpo_step, length_reward, prompt_config, prompt_consumer, sampled)


class SeveralEnds(CharTokenizer):
    """A tokenizer in which the digits 0 to 4 end a completion too."""

    def __init__(self):
        super().__init__(stop=True)
        self.stop_token_ids = (self.stop_token_id, *self.encode("01234"))


def test_a_completion_ends_with_its_first_end_token_and_what_is_behind_it_changes_nothing(prompts):
    c, tokenizer = prompt_config(max_new_tokens=30, batch_size=8), SeveralEnds()
    policy = CausalPolicy(causal_model(scale=2.0), tokenizer)
    batch, rollouts = prompt_consumer(prompts, c).problems("train", 0), sampled(policy, prompts, c)
    texts, ends, last = rollouts.texts, set(tokenizer.stop_token_ids), []
    for n in range(len(rollouts.target)):
        record = batch["record"][n // 4]
        written = rollouts.target[n, : int(rollouts.mask[n].sum())].tolist()
        stopped = written[-1] in ends
        assert not ends.intersection(written[:-1]) and stopped != bool(rollouts.truncated[n])
        assert texts.completion_ids[n] == written and texts.completions[n] == CAUSAL.decode(written)
        assert texts.tokens[n].tolist() == [*record["tokens"], *(written[:-1] if stopped else written)]
        last += written[-1:]
    assert len(ends.intersection(last)) > 2 and rollouts.truncated.any(), "some end, with several tokens"
    behind = (rollouts.mask == 0).view_as(rollouts.inputs.tokens)
    other = replace(rollouts, inputs=replace(rollouts.inputs, tokens=rollouts.inputs.tokens.masked_fill(behind, 7)))
    assert torch.equal(policy.score(other, 1.0).logp, policy.score(rollouts, 1.0).logp)


def test_the_stop_token_is_trained(prompts):
    """The reward is to be short: a policy whose stop token had no gradient could not learn it."""
    c = prompt_config(kl_beta=0.0, learning_rate=3e-2, batch_size=8)
    policy, data, lengths = causal_policy(scale=1.0), prompt_consumer(prompts, c), []
    optimizers = build_optimizers(policy, c)

    def brief(rollouts):
        return Scored(-length_reward(rollouts).reward)

    for number in range(60):
        lengths.append(grpo_step(policy, None, brief, data, c, number, optimizers)["completion_length"])
    assert lengths[0] > 5 and np.mean(lengths[-5:]) < 2


@torch.no_grad()
def test_greedy_completions_are_the_likeliest_tokens_one_by_one(prompts):
    c, policy = prompt_config(batch_size=8, max_new_tokens=9), causal_policy(scale=4.0)
    batch = prompt_consumer(prompts, c).problems("train", 0)
    for record, text in zip(batch["record"], policy.greedy(batch, SamplingSettings.of(c)).completions, strict=True):
        ids = list(record["tokens"])
        while len(ids) < len(record["tokens"]) + 9 and ids[-1] != CAUSAL.stop_token_id:
            ids.append(int(policy.model(torch.tensor([ids]))[0, -1].argmax()))
        assert text == CAUSAL.decode(ids[len(record["tokens"]) :])
