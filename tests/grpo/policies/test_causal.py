"""The causal policy: prompts that are read once, the texts that it samples, and greedy completions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from core.tokenizer import CharTokenizer
from grpo.policies import causal
from grpo.policies.causal import CausalPolicy
from grpo.rollout import Rollouts
from tests.tiny import (
    CAUSAL,
    causal_model,
    causal_policy,
    clear_gradient,
    flat_gradient,
    prompt_config,
    prompt_consumer,
    sampled,
)


def unequal_rollouts(seed=1):
    """Rollouts of prompts of 2 to 10 tokens with completions of 1 to 7."""
    rng, (P, G, M, T) = np.random.default_rng(seed), (5, 4, 7, 9)
    length, prompt_length = torch.from_numpy(rng.integers(1, M + 1, (P, G))), torch.from_numpy(rng.integers(1, T + 1, P))
    prompt_length[0] = T
    ids = lambda *shape: torch.from_numpy(rng.integers(0, CAUSAL.base_vocab_size, shape))
    inputs = {"chosen": torch.arange(M) < length[..., None], "prompt": ids(P, T), "prompt_length": prompt_length,
              "tokens": ids(P, G, M)}
    mask, target = inputs["chosen"].flatten(0, 1).float(), ids(P * G, M)
    return Rollouts(target, mask, mask, torch.zeros(P * G, M), torch.zeros(P * G, dtype=torch.bool), M, inputs)


class WithoutCache(CausalPolicy):
    """Reads the prompt again with each completion, all of them padded to the longest."""

    def states(self, rollouts):
        x, G = rollouts.inputs, rollouts.group_size
        T = x["prompt"].shape[1]
        prompt, padding = x["prompt"].flip(1).repeat_interleave(G, 0), (T - x["prompt_length"]).repeat_interleave(G)
        h = self.model.states(torch.cat((prompt, x["tokens"].flatten(0, 1)), 1), padding=padding)[:, T:]
        return h[x["chosen"].flatten(0, 1)]


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


class SeveralEnds(CharTokenizer):
    """A tokenizer in which the digits 0 to 4 end a completion too."""

    def __init__(self):
        super().__init__(stop=True)
        self.stop_token_ids = (self.stop_token_id, *self.encode("01234"))


def test_texts_are_prompt_and_completion_without_padding_and_stop_token(prompts):
    c, tokenizer = prompt_config(max_new_tokens=30, batch_size=8), SeveralEnds()
    policy = CausalPolicy(causal_model(scale=2.0), tokenizer)
    batch, rollouts = prompt_consumer(prompts, c).problems("train", 0), sampled(policy, prompts, c)
    texts, ended, lengths, ends = rollouts.texts, 0, set(), set(tokenizer.stop_token_ids)
    last = set()
    for n in range(len(rollouts.target)):
        record = batch["record"][n // 4]
        written = rollouts.target[n, : int(rollouts.mask[n].sum())].tolist()
        stopped = written[-1] in ends
        assert not ends.intersection(written[:-1]) and stopped != bool(rollouts.truncated[n])
        assert texts.completion_ids[n] == written
        assert texts.tokens[n].tolist() == [*record["tokens"], *(written[:-1] if stopped else written)]
        assert texts.completions[n] == CAUSAL.decode(written) and texts.prompts[n] == record["prompt"]
        assert texts.columns["answer"][n] == record["answer"]
        for m in range(len(written) - stopped):
            assert texts.tokens[n][int(texts.place[n, m])] == rollouts.target[n, m]
        ended += stopped
        last.add(written[-1])
        lengths.add(len(record["tokens"]))
    assert 0 < ended < len(rollouts.target) and len(lengths) > 1, "with and without a stop token, of several lengths"
    assert len(last & ends) > 2
    assert texts.metrics["truncated"][0] == len(rollouts.target) - ended
    assert [float(x) for x in texts.metrics["completion_length"]] == [float(rollouts.mask.sum()), 32.0]
    assert rollouts.max_tokens == 30
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
