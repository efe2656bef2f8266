"""The fill-in policy: what it samples is what it scores, in one pass and in several."""

import pytest

from core.distributions import sampling_logp
from tests.tiny import config, consumer, fill_policy, masked_problems, sampled


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("estimator", ["trajectory", "one_step"])
def test_scores_equal_reading_each_text_on_its_own(dataset, estimator, S):
    c, policy = config(unmask_steps=S, fill_estimator=estimator, batch_size=3), fill_policy()
    r = sampled(policy, dataset, c)
    (_, _, position, _), T = masked_problems(consumer(dataset, c)), c.block_size
    logp, rows = policy.score(r, 1.0).logp, r.inputs.position.shape[1]
    texts_read = 1 + (S - 1) * c.group_size if estimator == "trajectory" else 1
    assert r.inputs.texts.shape == (3, texts_read, T)
    for n in range(0, len(r.target), 3):
        i, g = divmod(n, 4)
        p = [sampling_logp(policy.model(text[None]), 1.0)[0] for text in r.inputs.texts[i]]
        for m in range(r.target.shape[1]):
            if r.mask[n, m]:
                place = i, g if rows > 1 else 0, m
                text = r.inputs.text[place]
                column = r.inputs.position[place]
                assert column == position[i, m]
                assert abs(float(p[text][column, r.target[n, m]].detach() - logp[n, m].detach())) < 1e-4
