"""Rollouts: problems selected from them, several joined to one, and their scores unchanged by both."""

import dataclasses

import pytest
import torch

from core.files.records import write_prompts
from grpo.policies.fill_views import FILL_ESTIMATORS
from grpo.rollout import BY_COMPLETION, BY_TOKEN, join_rollouts, places_of
from grpo.scoring import score, score_in_batches, with_reference
from tests.tiny import CAUSAL, causal_policy, config, fill_policy, prompt_consumer, sampled

KINDS = {"causal": {"max_new_tokens": 6}, "one pass": {}, "passes": {"unmask_steps": 3},
         "coupled": {"unmask_steps": 3, "fill_estimator": "coupled"}}


def example(kind, dataset, prompts, estimator=None, number=0, **settings):
    """A policy and its rollouts of 4 problems; estimator: of the KL, for which the reference scores them, or None."""
    c, build, folder = config(**KINDS[kind] | settings), fill_policy, dataset
    if kind == "causal":
        build, folder = causal_policy, prompts
    policy = build(seed=1)
    rollouts = sampled(policy, folder, c, number)
    return policy, with_reference(rollouts, build(seed=2).frozen(), estimator, c) if estimator else rollouts


def test_places_of_is_the_places_of_a_loop():
    counts = torch.tensor([3, 0, 2, 4])
    for problems in ([], [1], [3, 0], [0, 1, 2, 3]):
        place, owned = 0, {}
        for p, n in enumerate(counts.tolist()):
            owned[p], place = list(range(place, place + n)), place + n
        assert places_of(torch.tensor(problems, dtype=torch.long), counts).tolist() == [
            i for p in problems for i in owned[p]]


@pytest.mark.parametrize("estimator", ["exact", "k3"])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_selected_problems_have_the_rows_and_scores_that_they_had(dataset, prompts, kind, top_p, estimator):
    if kind == "coupled" and top_p < 1:
        pytest.skip("this estimator scores the whole distribution")
    policy, rollouts = example(kind, dataset, prompts, estimator, top_p=top_p)
    rollouts = dataclasses.replace(rollouts, advantage=torch.randn(16, 1))
    whole, (part, rows) = score(policy, rollouts, 1.0), rollouts.select(torch.tensor([3, 1]))
    assert rows.tolist() == [12, 13, 14, 15, 4, 5, 6, 7] and part.problems == 2 and part.group_size == 4
    for name in BY_COMPLETION:
        if getattr(rollouts, name) is not None:
            assert torch.equal(getattr(part, name), getattr(rollouts, name)[rows]), name
    assert part.texts is None and part.max_tokens == rollouts.max_tokens
    found, mask = score(policy, part, 1.0), part.mask
    for name in ("logp", "entropy", "kl") if estimator == "exact" else ("logp", "entropy"):
        torch.testing.assert_close(getattr(found, name) * mask, getattr(whole, name)[rows] * mask, rtol=1e-4, atol=1e-4)
    nothing, rows = rollouts.select(torch.arange(0))
    assert nothing.problems == len(rows) == nothing.reading.problems == 0


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("problems", [1, 4])
def test_joined_prompts_score_as_they_did_apart(prompts, shared, problems):
    c, policy = config(max_new_tokens=6, batch_size=problems), causal_policy(shared_prompt=shared)
    reference, parts, widths = causal_policy(seed=4).frozen(), [], set()
    for number in range(12 // problems):  # single prompts are of different widths, and none is padded
        rollouts = sampled(policy, prompts, c, number)
        parts.append(with_reference(rollouts, reference, "k3", c))
        widths.add(rollouts.reading.prompt.shape[1])
    joined = join_rollouts([parts[0].select(torch.arange(0))[0], *parts])
    assert problems > 1 or len(widths) > 1
    assert joined.problems == joined.reading.problems == 12
    apart = torch.cat([score(policy, r, 1.0).logp.sum(1) for r in parts])
    torch.testing.assert_close(score(policy, joined, 1.0).logp.sum(1), apart, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined.ref_logp.sum(1), torch.cat([r.ref_logp.sum(1) for r in parts]))


def test_prompts_of_one_token_join_longer_ones(tmp_path):
    records = [{"prompt": text, "split": split} for text, split in (("7", "train"), ("7+8=", "train"), ("9", "val"))]
    write_prompts(str(tmp_path), records, CAUSAL)
    c, policy = config(max_new_tokens=6, batch_size=1), causal_policy()
    data = prompt_consumer(str(tmp_path), c)
    ordered = sorted(data.records["train"], key=lambda r: len(r["tokens"]))
    parts = [policy.sample(data.pack([record], [0]), 0, c) for record in ordered]
    assert [len(r.texts.prompts[0]) for r in parts] == [1, 4]
    joined = join_rollouts(parts)
    apart = torch.cat([score(policy, r, 1.0).logp.sum(1) for r in parts])
    torch.testing.assert_close(score(policy, joined, 1.0).logp.sum(1), apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fill_estimator", FILL_ESTIMATORS)
def test_joined_texts_score_as_they_did_apart(dataset, fill_estimator):
    c = config(unmask_steps=3, fill_estimator=fill_estimator, batch_size=3)
    policy, reference, parts = fill_policy(), fill_policy(seed=3).frozen(), []
    for number in range(2):
        r = with_reference(sampled(policy, dataset, c, number), reference, "exact", c)
        parts.append(dataclasses.replace(r, old_logp=score_in_batches(policy, r, c)))
    joined = join_rollouts(parts)
    found = score(policy, joined, 1.0)
    torch.testing.assert_close(found.logp * joined.mask, joined.old_logp * joined.mask, rtol=1e-5, atol=1e-5)
    apart = torch.cat([(score(policy, r, 1.0).kl * r.mask).sum(1) for r in parts])
    torch.testing.assert_close((found.kl * joined.mask).sum(1), apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ["exact", "k3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_join_pads_with_zeros_and_keeps_every_row(dataset, prompts, kind, estimator):
    truncation = {} if kind == "coupled" else {"top_k": 9}
    parts = [example(kind, dataset, prompts, estimator, number, **truncation)[1] for number in range(3)]
    joined = join_rollouts(parts)
    for name in BY_TOKEN:
        if getattr(joined, name) is not None:
            rows = [row for part in parts for row in getattr(part, name).tolist()]
            width = getattr(joined, name).shape[1]
            assert getattr(joined, name).tolist() == [row + [0] * (width - len(row)) for row in rows], name
    assert joined.truncated.tolist() == [x for part in parts for x in part.truncated.tolist()]
    stored = {"ref_distributions": lambda r: r.ref_distributions,
              "kept": lambda r: None if r.reading.kept is None else r.reading.kept.dense(97)}
    for name, of in stored.items():
        if of(joined) is not None:
            assert torch.equal(of(joined), torch.cat([of(part) for part in parts])), name
    assert (joined.ref_distributions is None) == (estimator == "k3")
    assert (joined.reading.kept is None) == (not truncation)


def test_rollouts_with_an_advantage_are_not_joined(dataset, prompts):
    _, rollouts = example("one pass", dataset, prompts)
    done = dataclasses.replace(rollouts, advantage=torch.zeros(16, 1))
    with pytest.raises(AssertionError, match="join before compute_rollout_advantages"):
        join_rollouts([rollouts, done])
