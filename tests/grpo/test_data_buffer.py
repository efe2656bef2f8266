"""The buffer: what it takes, what it refuses, and the minibatches that it hands out."""

import dataclasses

import pytest
import torch

from core.checkpoint_manager import as_plain
from grpo.data_buffer import DataBuffer
from grpo.rollout import Rollouts
from grpo.reference import with_reference
from tests.tiny import causal_policy, config, fill_policy, sampled


def with_random_advantage(rollouts):
    return dataclasses.replace(rollouts, advantage=torch.randn(len(rollouts.target), 1), texts=None)


def fill_rollouts(dataset, **settings):
    c = config(**settings)
    return with_random_advantage(sampled(fill_policy(), dataset, c))


def causal_rollouts(prompts, **settings):
    c = config(max_new_tokens=6, **settings)
    return with_random_advantage(sampled(causal_policy(scale=3.0), prompts, c))


def assert_equal(a, b):
    """Two dictionaries or lists of tensors and values."""
    if isinstance(a, (dict, list)):
        assert len(a) == len(b)
        for key, x in a.items() if isinstance(a, dict) else enumerate(a):
            assert_equal(x, b[key])
    else:
        assert torch.equal(a, b) if torch.is_tensor(a) else a == b


def test_minibatches_divide_the_problems_and_leave_groups_whole(dataset):
    rollouts, buffer = fill_rollouts(dataset, batch_size=5), DataBuffer()
    buffer.prepare_training_batch(buffer.store_rollout_data(rollouts, {}), 2, 3)
    seen = [part for part, _ in buffer]
    texts = lambda r: r.inputs["texts"].flatten(1)
    for epoch in (seen[:3], seen[3:]):
        assert sorted(r.problems for r in epoch) == [1, 2, 2]
        for read in (texts, lambda r: r.target, lambda r: r.advantage):
            rows = sorted(map(tuple, torch.cat([read(r) for r in epoch]).tolist()))
            assert rows == sorted(map(tuple, read(rollouts).tolist()))
    for part in seen:
        for i, text in enumerate(texts(part).tolist()):
            number = texts(rollouts).tolist().index(text)
            assert torch.equal(part.target[4 * i : 4 * i + 4], rollouts.target[4 * number : 4 * number + 4])
    assert [texts(r).tolist() for r in seen[:3]] != [texts(r).tolist() for r in seen[3:]], "shuffled anew"
    assert not buffer.rollouts and not buffer.queue


@pytest.mark.parametrize("kind", ["fill", "causal"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_buffer_read_back_hands_out_the_same_minibatches(dataset, prompts, tmp_path, kind, top_p):
    rollouts = fill_rollouts(dataset, top_p=top_p) if kind == "fill" else causal_rollouts(prompts, top_p=top_p)
    policy = fill_policy(seed=2) if kind == "fill" else causal_policy(seed=2)
    rollouts = with_reference(rollouts, policy, "exact" if kind == "fill" else "k3", config())
    assert ("kept" in rollouts.inputs) == (top_p < 1)
    buffer = DataBuffer(seed=3)
    buffer.prepare_training_batch(buffer.store_rollout_data(rollouts, {"a": (1.0, None)}), 2, 2)
    buffer.store_evaluation_data(0, {"x": 0.5})
    buffer.next_minibatch()
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    twin = DataBuffer(seed=3)
    twin.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert twin.get_buffer_statistics() == buffer.get_buffer_statistics()
    assert list(twin.evaluations) == [{"step": 0, "x": 0.5}]
    for (a, sums), (b, twin_sums) in zip(buffer, twin, strict=True):
        assert sums == twin_sums and isinstance(b, Rollouts)
        assert_equal(as_plain(a), as_plain(b))
    assert not twin.rollouts
