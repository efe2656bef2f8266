"""The fill-in policy: what it samples is what it scores, in one pass and in several."""

import pytest
import torch

from core.distributions import sampling_logp
from tests.tiny import TOKENIZER, config, consumer, fill_policy, masked_problems, sampled


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("estimator", ["trajectory", "one_step"])
def test_scores_equal_reading_each_text_on_its_own(dataset, estimator, S):
    c, policy = config(unmask_steps=S, fill_estimator=estimator, batch_size=3), fill_policy()
    r = sampled(policy, dataset, c)
    (_, _, position, _), T = masked_problems(consumer(dataset, c)), c.block_size
    logp, rows = policy.score(r, 1.0).logp, r.inputs["position"].shape[1]
    texts_read = 1 + (S - 1) * c.group_size if estimator == "trajectory" else 1
    assert r.inputs["texts"].shape == (3, texts_read, T)
    for n in range(0, len(r.target), 3):
        i, g = divmod(n, 4)
        p = [sampling_logp(policy.model(text[None]), 1.0)[0] for text in r.inputs["texts"][i]]
        for m in range(r.target.shape[1]):
            if r.mask[n, m]:
                view, place = divmod(int(r.inputs["position"][i, g if rows > 1 else 0, m]), T)
                assert place == position[i, m]
                assert abs(float(p[view][place, r.target[n, m]].detach() - logp[n, m].detach())) < 1e-4


@pytest.mark.parametrize("S", [1, 3])
def test_texts_are_those_of_the_window_with_the_sampled_tokens_in_it(dataset, S):
    c, policy = config(unmask_steps=S), fill_policy()
    r, (batch, input, position, chosen) = sampled(policy, dataset, c), masked_problems(consumer(dataset, c))
    for n, tokens in enumerate(r.texts.tokens):
        text = input[n // 4].clone()
        for m in range(r.target.shape[1]):
            if chosen[n // 4, m]:
                text[position[n // 4, m]] = r.target[n, m]
        assert torch.equal(tokens, text) and torch.equal(r.texts.place[n], position[n // 4])
        assert r.texts.completion_ids[n] == text.tolist()
        assert r.texts.completions[n] == TOKENIZER.decode(text.tolist())
        assert r.texts.prompts[n] == TOKENIZER.decode(input[n // 4].tolist())
        assert r.texts.columns["answer"][n] == TOKENIZER.decode(batch["target"][n // 4].tolist())
    truth = torch.from_numpy(batch["target"]).gather(1, position).repeat_interleave(4, 0)
    right = int(((r.target == truth) * r.mask).sum())
    assert [float(x) for x in r.texts.metrics["mean_token_accuracy"]] == [right, r.mask.sum()]
    assert len(r.texts.tokens) == len(r.texts.prompts) == 16
