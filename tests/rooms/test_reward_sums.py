"""The rewards of a run: how they are weighted, added, normalised and skipped."""

from types import SimpleNamespace

import pytest
import torch

from core.judge import calculate_judge_scores
from grpo.build import make_rewards
from grpo.reward_functions.judge import Judge
from grpo.rewards import import_rewards, reward
from tests.tiny import TOKENIZER, config, judge, shaped

import_rewards()


def looked_up(name, values):
    """Registers a reward of this name that returns these values."""
    def look_up(completions, log_metric):
        log_metric("called", len(completions))
        return values

    look_up.__name__ = look_up.__qualname__ = name
    reward(look_up)


def scored(texts, group_size, *names, judge=None, **settings):
    """(the Scored of these texts, after the shapes of the settings, the rewards of a run that names these)"""
    c = config(**{"reward_functions": names, "task_type": "general", "max_new_tokens": 5} | settings)
    rewards = make_rewards(c, judge)
    rollouts = SimpleNamespace(texts=texts, target=torch.zeros(1), group_size=group_size)
    return shaped(rollouts, rewards(rollouts), c, rewards)[1], rewards


def texts_of(completions, tokens=None, place=None, **columns):
    return SimpleNamespace(prompts=["p"] * len(completions), completions=list(completions), columns=columns,
                           tokens=tokens, place=place, completion_ids=[[0]] * len(completions))


def test_rewards_are_weighted_added_and_may_skip():
    looked_up("half", [0.5, None, 0.5, None])
    looked_up("tensor", torch.tensor([0.25] * 4))
    texts = texts_of(["7", "7", "8", "8"], answer=["7"] * 4)
    found, rewards = scored(texts, 2, "half", "contains", "tensor", reward_weights=(2.0, 1.0, 4.0))
    assert found.reward.tolist() == [[3.0, 2.0], [2.0, 1.0]] and found.credit[..., 0].equal(found.reward)
    assert {name: x.nan_to_num(-1).tolist() for name, x in found.values.items()} == {
        "half": [0.5, -1, 0.5, -1], "contains": [1, 1, 0, 0], "tensor": [0.25] * 4}
    assert found.weight == 1 and found.metrics == {"called": (8, 2)}
    assert list(rewards.score(texts, 1, ["contains"])[0]) == ["contains"], "one can be asked alone"
    for names, weights in ((("half",), ()), (("half", "contains"), (1.0, 0.0))):
        found = scored(texts, 4, *names, reward_weights=weights)[0]
        assert found.reward.isnan().tolist() == [[False, True, False, True]], "a weight of 0 scores nothing"


def test_rewards_may_be_normalised_before_they_are_added():
    looked_up("up", [0.1, 0.3, None, 0.9])
    looked_up("flat", [7.0, 7.0, 7.0, None])
    texts, normalised = texts_of([""] * 4), {"reward_normalisation": "group"}
    found, _ = scored(texts, 4, "up", "flat", reward_weights=(1.0, 2.0), **normalised)
    mean, std = 1.3 / 3, float(torch.tensor([0.1, 0.3, 0.9]).std())
    expected = [(0.1 - mean) / std, (0.3 - mean) / std, 0.0, (0.9 - mean) / std]
    assert found.credit[0, :, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert found.reward[0].tolist() == pytest.approx([14.1, 14.3, 14.0, 0.9]), "the metrics show raw rewards"
    looked_up("rises", [0.1, 0.3, 0.2, 0.9])
    looked_up("falls", [0.9, 0.7, 0.8, 0.1])
    found, _ = scored(texts, 4, "rises", "falls", **normalised)
    assert found.credit.unique().numel() == 1, "those that cancel are equal to the last bit: the group can be dropped"


@pytest.mark.parametrize("window", [None, 2])
def test_the_judge_alone_reads_token_ids_and_with_a_credit_window_gives_credit_to_tokens(window):
    ids = torch.randint(0, 96, (6, 20))
    texts, reader = texts_of([""] * 6, list(ids), torch.randint(0, 20, (6, 4))), Judge(judge(), TOKENIZER, True)
    found, _ = scored(texts, 3, "judge", credit_window=window, judge=reader)
    expected = calculate_judge_scores(reader.model, ids, TOKENIZER.cls_token_id)
    assert torch.equal(found.reward, expected.view(2, 3)) and torch.equal(found.values["judge"], expected)
    credit = found.reward[..., None] if window is None else reader.score_and_credit(texts, 2)[1].view(2, 3, 4)
    assert torch.equal(found.credit, credit) and found.weight == 1
