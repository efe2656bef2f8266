"""The rewards of a run: how they are weighted and added, what is skipped, and what each function gets of a step."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch

from core.judge import calculate_judge_scores
from grpo.build import make_rewards
from grpo.reward_functions.judge import Judge
from grpo.rewards import import_rewards, reward
from tests.tiny import TOKENIZER, config, fork_workers, judge, shaped

import_rewards()


def made(*names, judge=None, **settings):
    """The rewards of a run that names these."""
    settings = {"reward_functions": names, "task_type": "general", "max_new_tokens": 5} | settings
    return make_rewards(config(**settings), judge)


def texts_of(completions, tokens=None, place=None, **columns):
    return SimpleNamespace(prompts=["p"] * len(completions), completions=list(completions), columns=columns,
                           tokens=tokens, place=place, completion_ids=[[*map(ord, text)] for text in completions])


def scored(rewards, texts, group_size):
    """The Scored of rollouts with these texts, after the shapes of the settings."""
    rollouts = SimpleNamespace(texts=texts, target=torch.zeros(1), group_size=group_size)
    return shaped(rollouts, rewards(rollouts), rewards.config, rewards)[1]


def values_of(found):
    """{name: the values of a reward, -1 for those that it skipped}"""
    return {name: x.nan_to_num(-1).tolist() for name, x in found.items()}


def looked_up(name, values):
    """Registers a reward of this name that returns these values."""
    def look_up(completions):
        return values

    look_up.__name__ = look_up.__qualname__ = name
    reward(look_up)


def test_rewards_are_weighted_added_and_may_skip():
    looked_up("half", [0.5, None, 0.5, None])
    looked_up("tensor", torch.tensor([0.25] * 4))
    texts = texts_of(["7", "7", "8", "8"], answer=["7"] * 4)
    rewards = made("half", "contains", "tensor", reward_weights=(2.0, 1.0, 4.0))
    values, _ = rewards.score(texts, 4)
    assert values_of(values) == {"half": [0.5, -1, 0.5, -1], "contains": [1, 1, 0, 0], "tensor": [0.25] * 4}
    found = scored(rewards, texts, 4)
    assert found.reward.tolist() == [[3.0, 2.0, 2.0, 1.0]] and found.credit[..., 0].equal(found.reward)
    assert found.weight == 1 and set(found.values) == set(rewards.names)
    assert scored(rewards, texts, 2).reward.tolist() == [[3.0, 2.0], [2.0, 1.0]], "a row for each problem"
    assert scored(made("half"), texts, 4).reward.isnan().tolist() == [[False, True, False, True]]
    assert list(rewards.score(texts, 1, ["contains"])[0]) == ["contains"], "one can be asked alone"
    measured = scored(made("half", "contains", reward_weights=(1.0, 0.0)), texts, 4)
    assert measured.reward.isnan().tolist() == [[False, True, False, True]], "a weight of 0 scores nothing"


PLAIN = """
def tokens(completions, completion_ids, level=None, **kwargs):
    kwargs["log_metric"]("mean_length", sum(map(len, completion_ids)) / len(completion_ids))
    kwargs["log_extra"]("first", [ids[0] for ids in completion_ids])
    step = kwargs["trainer_state"].global_step
    return [len(ids) + step if x is None or x > 0 else None for ids, x in zip(completion_ids, level, strict=True)]

async def loud(completions, log_extra):
    log_extra("first", [text[-1:] for text in completions])
    return [float(text.isupper()) for text in completions]
"""


def test_a_plain_function_of_the_reward_file_is_a_reward(tmp_path):
    (tmp_path / "mine.py").write_text(PLAIN)
    rewards = made("tokens", "loud", reward_weights=(1.0, 10.0), reward_file=str(tmp_path / "mine.py"), max_iters=7)
    rewards.check([{"level": 3}, {}])
    texts = texts_of(["a", "BB", "ccc", "D"], level=[1, 0, 1, None])
    found = scored(rewards, texts, 2)
    assert found.reward.tolist() == [[1, 10], [3, 11]] and found.metrics == {"mean_length": (1.75, 1)}
    rewards.state.global_step = 5
    del texts.columns["level"]
    values, log = rewards.score(texts, 2)
    assert values["tokens"].tolist() == [6, 7, 8, 6], "a field that these records lack is None"
    assert log.columns == {"first": [97, 66, 99, 68], "loud/first": ["a", "B", "c", "D"]}


def test_rewards_may_be_normalised_before_they_are_added():
    looked_up("up", [0.1, 0.3, None, 0.9])
    looked_up("flat", [7.0, 7.0, 7.0, None])
    found = scored(made("up", "flat", reward_weights=(1.0, 2.0), reward_normalisation="group"), texts_of([""] * 4), 4)
    mean, std = 1.3 / 3, float(torch.tensor([0.1, 0.3, 0.9]).std())
    expected = [(0.1 - mean) / std, (0.3 - mean) / std, 0.0, (0.9 - mean) / std]
    assert found.credit[0, :, 0].tolist() == pytest.approx(expected, abs=1e-3)
    assert found.reward[0].tolist() == pytest.approx([14.1, 14.3, 14.0, 0.9]), "the metrics show raw rewards"


def test_rewards_that_cancel_when_normalised_teach_nothing():
    looked_up("up", [0.1, 0.3, 0.2, 0.9])
    looked_up("down", [0.9, 0.7, 0.8, 0.1])
    for weights, differ in (((1.0, 3.0), True), ((1.0, 1.0), False)):
        found = scored(made("up", "down", reward_weights=weights, reward_normalisation="group"), texts_of([""] * 4), 4)
        assert (found.credit.unique().numel() > 1) == differ, "equal to the last bit: the group can be dropped"


@pytest.mark.parametrize("window", [None, 2])
def test_the_judge_alone_reads_token_ids_and_with_a_credit_window_gives_credit_to_tokens(window):
    ids = torch.randint(0, 96, (6, 20))
    texts, reader = texts_of([""] * 6, list(ids), torch.randint(0, 20, (6, 4))), Judge(judge(), TOKENIZER, True)
    found = scored(made("judge", credit_window=window, judge=reader), texts, 3)
    expected = calculate_judge_scores(reader.model, ids, TOKENIZER.cls_token_id)
    assert torch.equal(found.reward, expected.view(2, 3)) and torch.equal(found.values["judge"], expected)
    credit = found.reward[..., None] if window is None else reader.score_and_credit(texts, 2)[1].view(2, 3, 4)
    assert torch.equal(found.credit, credit) and found.weight == 1


def lengths(completions):
    return [float(len(text)) if text != "late" else time.sleep(3600) for text in completions]


def test_a_late_completion_is_skipped(monkeypatch):
    fork_workers(monkeypatch)
    reward(0, 4, slow=True)(lengths)
    texts = texts_of(["7", "late", "8", "77"], answer=["7", "late", "7", "7"])
    with contextlib.closing(made("contains", "lengths", reward_timeout=1.0)) as rewards:
        found = scored(rewards, texts, 4)
        assert values_of(found.values) == {"contains": [1, 1, 0, 1], "lengths": [1, -1, 1, 2]}
        assert found.reward.tolist() == [[2, 1, 1, 3]]
        later = texts_of(["a", "bb"], answer=["a", "b"])
        assert rewards.score(later, 2)[0]["lengths"].tolist() == [1, 2], "an earlier call's late one is forgotten"
