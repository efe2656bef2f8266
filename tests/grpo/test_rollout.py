"""Rollouts: problems selected from them, several joined to one, and their scores unchanged by both."""

import dataclasses

import pytest
import torch

from core.device import moved
from grpo.policies.fill_views import FILL_ESTIMATORS
from grpo.rollout import Texts, join, tensors
from grpo.reference import with_reference
from tests.tiny import causal_policy, config, fill_policy, sampled

KINDS = {"causal": {"max_new_tokens": 6}, "one pass": {}, "passes": {"unmask_steps": 3},
         "agrpo": {"unmask_steps": 3, "fill_estimator": "agrpo"}}


def example(kind, dataset, prompts, estimator, number=0, **settings):
    """A policy and its rollouts of 4 problems, scored by a reference for this estimator of the KL."""
    c, build, folder = config(**KINDS[kind] | settings), fill_policy, dataset
    if kind == "causal":
        build, folder = causal_policy, prompts
    policy = build(seed=1)
    return policy, with_reference(sampled(policy, folder, c, number), build(seed=2).frozen(), estimator, c)


@pytest.mark.parametrize("kind, top_p, estimator", [
    ("causal", 0.8, "exact"), ("causal", 1.0, "k3"), ("one pass", 0.8, "exact"), ("one pass", 1.0, "k3"),
    ("passes", 0.8, "exact"), ("agrpo", 1.0, "exact")])
def test_selected_problems_have_the_rows_and_scores_that_they_had(dataset, prompts, kind, top_p, estimator):
    policy, rollouts = example(kind, dataset, prompts, estimator, top_p=top_p)
    rollouts = dataclasses.replace(rollouts, advantage=torch.randn(16, 1))
    whole, (part, rows) = policy.score(rollouts, 1.0), rollouts.select(torch.tensor([3, 1]))
    assert rows.tolist() == [12, 13, 14, 15, 4, 5, 6, 7] and part.problems == 2 and part.group_size == 4
    for name, x in tensors(rollouts).items():
        assert torch.equal(getattr(part, name), x[rows]), name
    assert part.texts is None and part.max_tokens == rollouts.max_tokens
    found, mask = policy.score(part, 1.0), part.mask
    for name in tensors(whole):
        torch.testing.assert_close(getattr(found, name) * mask, getattr(whole, name)[rows] * mask, rtol=1e-4, atol=1e-4)
    nothing, rows = rollouts.select(torch.arange(0))
    assert nothing.problems == len(rows) == len(nothing.target) == 0


@pytest.mark.parametrize("kind, estimator", [("causal", "exact"), ("causal", "k3"), ("one pass", "exact"),
                                             *(("passes", name) for name in FILL_ESTIMATORS)])
def test_joined_rollouts_score_as_they_did_apart_and_keep_every_row(dataset, prompts, kind, estimator):
    settings = {"batch_size": 1, "top_k": 9}  # single prompts are of different widths
    if kind == "passes" and estimator != "trajectory":
        settings = {"batch_size": 3, "fill_estimator": estimator}
    kl = "k3" if estimator == "k3" else "exact"
    policy, parts = None, []
    for number in range(6):
        policy, part = example(kind, dataset, prompts, kl, number, **settings)
        parts.append(part)
    joined = join([parts[0].select(torch.arange(0))[0], *[dataclasses.replace(part, texts=None) for part in parts]])
    assert joined.problems == 6 * settings["batch_size"] and joined.group_size == 4
    for name, x in tensors(joined).items():
        rows = [row for part in parts for row in getattr(part, name).tolist()]
        assert x.tolist() == [row if x.dim() == 1 else row + [0] * (x.shape[1] - len(row)) for row in rows], name
    assert kind != "causal" or len({part.inputs["prompt"].shape[1] for part in parts}) > 1
    found = policy.score(joined, 1.0)
    apart = [policy.score(part, 1.0) for part in parts]
    for name in tensors(found):
        expected = torch.cat([(getattr(scores, name) * part.mask).sum(1) for scores, part in zip(apart, parts, strict=True)])
        torch.testing.assert_close((getattr(found, name) * joined.mask).sum(1), expected, rtol=1e-4, atol=1e-4)
    assert ("kept" in joined.inputs) == ("top_k" in settings)


def test_texts_are_joined_with_the_fields_of_all_records_and_moved_with_their_tokens():
    a = Texts(["p"], ["c"], {"answer": [7]}, [torch.tensor([1, 2])], [[2]], torch.tensor([[1]]), {"length": (torch.tensor(1.0), 1)})
    b = Texts(["q"], ["d"], {"level": ["hard"]}, [torch.tensor([3])], [[3, 4]], torch.tensor([[1, 2]]), {"length": (2.0, 1)})
    joined = join([a, b])
    assert joined.columns == {"answer": [7, None], "level": [None, "hard"]} and joined.metrics == {"length": (3.0, 2)}
    assert joined.prompts == ["p", "q"] and joined.completion_ids == [[2], [3, 4]]
    assert joined.place.tolist() == [[1, 0], [1, 2]]
    elsewhere = moved(joined, "meta")
    assert {x.device.type for x in (*elsewhere.tokens, elsewhere.place, elsewhere.metrics["length"][0])} == {"meta"} and elsewhere.prompts == ["p", "q"]
