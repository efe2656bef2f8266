"""Our side of the comparison: steps on given work, whose completions end where they should."""

from types import SimpleNamespace

import pytest
import torch

from core.distributions import draw_uniforms, sample_from
from grpo.benchmarks import peer_ours
from grpo.benchmarks.peer_ours import ending_noise, our_steps
from grpo.benchmarks.work import Work
from grpo.policies import causal

TINY = Work(n_layer=1, n_head=2, n_embd=16, batch_size=2, group_size=3, prompt_length=4, completion_length=8,
            mixed=True)


def steps_of(steps):
    """The records of two steps, taken in this process. steps: calls turn as a side of the benchmark does"""
    records = []

    def turn(record):
        records.append(record)
        return len(records) <= 2

    steps(turn)
    return records[1:]


@pytest.mark.parametrize("huggingface", [False, True])
def test_every_phase_of_a_step_is_measured(huggingface, monkeypatch):
    if huggingface:
        pytest.importorskip("transformers")
    monkeypatch.setattr(causal, "draw_uniforms", draw_uniforms)  # our_steps replaces it
    settings = {"device": "cpu", "dtype": "float32"}
    records = steps_of(lambda turn: our_steps(TINY, huggingface, settings, turn))
    assert len(records) == 2
    for record in records:
        assert set(record) == {"generation", "reference", "policy", "optimizer", "rest", "step", "megabytes"}
        assert all(x > 0 for x in record.values())


def test_noise_ends_a_completion_at_its_length_and_not_before():
    noise = ending_noise(TINY, draw_uniforms)(0, 5, [0, 1], (3, 8))                  # (P, G, M)
    logits = torch.randn(2, 8, TINY.vocab_size, generator=torch.Generator().manual_seed(0)) / 10
    drawn = [sample_from(logp, u.T).T for logp, u in zip(logits.log_softmax(-1), noise, strict=True)]
    ends = torch.stack(drawn) == TINY.stop_id                                        # (P, G, M)
    assert (ends.sum(-1) == 1).all() and (ends.int().argmax(-1) + 1 == torch.from_numpy(TINY.lengths(5))).all()


def test_two_ranks_divide_the_prompts_of_a_step():
    ranks = [peer_ours.problems(TINY, 3, SimpleNamespace(batch_size=1), SimpleNamespace(rank=r)) for r in (0, 1)]
    assert [list(part["number"]) for part in ranks] == [[0], [1]]
    assert [list(part["input"][0]) for part in ranks] == TINY.prompts(3).tolist()
