"""The causal policy: the texts that it samples, greedy completions, and the stop token, which is trained."""

from dataclasses import replace

import numpy as np
import torch

from core.optim import build_optimizers
from core.tokenizer import CharTokenizer
from grpo.policies.causal import CausalPolicy
from grpo.rewards import Scored
from tests.tiny import (
    CAUSAL, causal_model, causal_policy, grpo_step, length_reward, prompt_config, prompt_consumer, sampled)


class SeveralEnds(CharTokenizer):
    """A tokenizer in which the digits 0 to 4 end a completion too."""

    def __init__(self):
        super().__init__(stop=True)
        self.stop_token_ids = (self.stop_token_id, *self.encode("01234"))


def test_texts_are_prompt_and_completion_without_padding_and_stop_token(prompts):
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
        assert (texts.prompts[n], texts.columns["answer"][n]) == (record["prompt"], record["answer"])
        for m in range(len(written) - stopped):
            assert texts.tokens[n][int(texts.place[n, m])] == rollouts.target[n, m]
        last.append(written[-1])
    ended = sum(token in ends for token in last)
    assert 0 < ended < len(last) and len(ends.intersection(last)) > 2, "some end, with several tokens"
    assert texts.metrics["truncated"][0] == len(last) - ended
    assert [float(x) for x in texts.metrics["completion_length"]] == [float(rollouts.mask.sum()), 32.0]
    behind = rollouts.mask == 0
    other = rollouts.inputs["tokens"].flatten(0, 1).masked_fill(behind, 7).view_as(rollouts.inputs["tokens"])
    other = replace(rollouts, inputs=rollouts.inputs | {"tokens": other})
    assert behind.any() and torch.equal(policy.score(other, 1.0).logp, policy.score(rollouts, 1.0).logp)


@torch.no_grad()
def test_greedy_completions_are_the_likeliest_tokens_one_by_one(prompts):
    c, policy = prompt_config(batch_size=8, max_new_tokens=9), causal_policy(scale=4.0)
    batch = prompt_consumer(prompts, c).problems("train", 0)
    for record, text in zip(batch["record"], policy.greedy(batch, c).completions, strict=True):
        ids = list(record["tokens"])
        for _ in range(9):
            ids.append(int(policy.model(torch.tensor([ids]))[0, -1].argmax()))
            if ids[-1] == CAUSAL.stop_token_id:
                break
        assert text == CAUSAL.decode(ids[len(record["tokens"]) :])


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
