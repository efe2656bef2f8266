"""The rewards of a run: how they are weighted, added, normalised and skipped."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from core.errors import Mistake
from core.judge import calculate_judge_scores
from grpo.build import make_rewards
from grpo.losses import OBJECTIVES
from grpo.reward_functions.judge import Judge
from grpo.rewards import Rewards, Scored, import_rewards, reward
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


def sums_by_hand(values, weights, G):
    """The reward of each completion, None where it is left out. values: N numbers or None of each function"""
    found = []
    for n in range(len(values[0])):
        group = range(n // G * G, n // G * G + G)
        total, counted, left_out = 0.0, 0, False
        for own, weight in zip(values, weights, strict=True):
            if weight == 0 or all(own[i] is None for i in group):
                continue  # it is only measured, or does not apply to the group
            if own[n] is None:
                left_out = True
                continue
            total += weight * own[n]
            counted += 1
        found.append(None if left_out or not counted else total)
    return found


def test_rewards_are_weighted_and_added_and_what_one_of_them_skips_alone_is_left_out_of_the_group():
    draw = random.Random(0)
    for trial in range(60):
        G, P, weights = draw.choice((1, 2, 4)), draw.choice((1, 3)), [draw.choice((0.0, 1.0, -2.0)) for _ in "abc"]
        values = []
        for name in "abc":
            skips = draw.choice((0, 0.2, 1))
            values.append([None if draw.random() < skips else draw.random() for _ in range(G * P)])
            looked_up(f"{name}{trial}", values[-1])
        names = [f"{name}{trial}" for name in "abc"]
        found = scored(texts_of("x" * (G * P)), G, *names, reward_weights=weights)[0].reward.flatten().tolist()
        if not any(weights):
            assert found == [0.0] * (G * P)
            continue
        expected = sums_by_hand(values, weights, G)
        assert [math.isnan(x) for x in found] == [x is None for x in expected]
        assert [x for x in found if not math.isnan(x)] == pytest.approx([x for x in expected if x is not None])


def test_infinite_rewards_that_cancel_are_no_skip_and_no_best_sample():
    looked_up("up", [math.inf, 1.0, -math.inf, 0.0])
    looked_up("down", [-math.inf, 1.0, 1.0, 0.0])
    found = scored(texts_of("abcd"), 4, "up", "down")[0]
    assert found.reward.tolist() == [[-math.inf, 2.0, -math.inf, 0.0]]


def test_a_reward_can_be_asked_alone_and_logs_metrics():
    looked_up("half", [0.5, None, 0.5, None])
    looked_up("tensor", torch.tensor([0.25] * 4))
    texts = texts_of(["7", "7", "8", "8"], answer=["7"] * 4)
    found, rewards = scored(texts, 4, "half", "contains", "tensor", reward_weights=(2.0, 1.0, 4.0))
    assert found.reward.nan_to_num(-1).tolist() == [[3.0, -1, 2.0, -1]]
    assert {name: x.nan_to_num(-1).tolist() for name, x in found.values.items()} == {
        "half": [0.5, -1, 0.5, -1], "contains": [1, 1, 0, 0], "tensor": [0.25] * 4}
    seconds = {f"time/reward/{name}": found.metrics.pop(f"time/reward/{name}") for name in rewards.names}
    assert found.weight == 1 and found.metrics == {"called": (8, 2)} and {count for _, count in seconds.values()} == {1}
    assert list(rewards.score(texts, 1, ["contains"])[0]) == ["contains"]


def test_functions_from_python_are_rewards_by_their_names_also_when_two_objects_take_turns():
    c, texts = config(task_type="general"), texts_of(["7", "", "88", "8"], answer=["7"] * 4)
    texts.columns["prompt"] = [[{"role": "user", "content": "?"}]] * 4
    rollouts = SimpleNamespace(texts=texts, target=torch.zeros(1), group_size=4)
    lengths = Rewards.of(c, mine=lambda completions, **columns: list(map(len, completions)))
    equal = Rewards.of(c, mine=reward(0, 1)(lambda completions, answer: [a == b for a, b in zip(completions, answer)]))
    for _ in range(2):
        assert lengths(rollouts).reward.tolist() == [[1, 0, 2, 1]] and lengths.success is None
        found = equal(rollouts)
        assert found.reward.tolist() == [[1, 0, 0, 0]] and equal.correct(found.values).tolist() == [1, 0, 0, 0]
    both = Rewards.of(config(reward_functions=("a", "b"), reward_weights=(1.0, -2.0)), a=lambda completions: [1.0] * 4,
                      b=lambda completions: [0.0, 1.0, None, 0.5])
    assert both(rollouts).reward.nan_to_num(-9).tolist() == [[1, -1, -9, 0]]
    assert list(both(rollouts).values) == ["a", "b"]


@pytest.mark.parametrize(("functions", "words"), [
    ({"a": len}, "reward_weights"), ({"contains": lambda completions: [], "b": len}, "contains")])
def test_functions_from_python_that_do_not_fit_the_config_or_have_a_name_of_ours_are_refused(functions, words):
    with pytest.raises(Mistake, match=words):
        Rewards.of(config(reward_functions=("a", "b"), reward_weights=(1.0, -2.0)), **functions)


@pytest.mark.parametrize("normalised", [{"advantage": "gdpo"}, {"objective": "of_a_row"}], ids=str)
def test_rewards_may_be_normalised_before_they_are_added(normalised, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "of_a_row", replace(OBJECTIVES["bnpo"], advantage="gdpo"))
    looked_up("up", [0.1, 0.3, None, 0.9, 0.2])
    looked_up("flat", [7.0, 7.0, 7.0, None, 7.0])
    found, _ = scored(texts_of([""] * 5), 5, "up", "flat", reward_weights=(1.0, 2.0), **normalised)
    std = float(torch.tensor([0.1, 0.3, 0.2]).std())
    expected = [-0.1 / std, 0.1 / std, -9, -9, 0.0]
    assert found.credit[0, :, 0].nan_to_num(-9).tolist() == pytest.approx(expected, abs=2e-3)
    assert found.reward[0].nan_to_num(-9).tolist() == pytest.approx([14.1, 14.3, -9, -9, 14.2]), "raw rewards"
    looked_up("rises", [0.1, 0.3, 0.2, 0.9])
    looked_up("falls", [0.9, 0.7, 0.8, 0.1])
    found, _ = scored(texts_of([""] * 4), 4, "rises", "falls", **normalised)
    assert found.credit.unique().numel() == 1, "those that cancel are equal to the last bit: the group can be dropped"
    assert config(**normalised).baseline == "gdpo"
    with pytest.raises(Mistake, match="credit_window"):
        config(judge_checkpoint="j", credit_window=2, **normalised)
    alone = Scored(torch.tensor([[0.1, 0.3, 0.2, math.nan]]))  # of a function that gives no values
    found = shaped(SimpleNamespace(group_size=4), alone, config(**normalised))[1]
    assert found.credit[0, :3, 0].tolist() == pytest.approx([-0.1 / std, 0.1 / std, 0.0], abs=2e-3)


@pytest.mark.parametrize("window", [None, 2])
def test_the_judge_alone_reads_token_ids_and_with_a_credit_window_gives_credit_to_tokens(window):
    ids = torch.randint(0, 96, (6, 20))
    texts, reader = texts_of([""] * 6, list(ids), torch.randint(0, 20, (6, 4))), Judge(judge(), TOKENIZER, True)
    found, _ = scored(texts, 3, "judge", credit_window=window, judge=reader)
    expected = calculate_judge_scores(reader.model, ids, TOKENIZER.cls_token_id)
    assert torch.equal(found.reward, expected.view(2, 3)) and torch.equal(found.values["judge"], expected)
    credit = found.reward[..., None] if window is None else reader.read(texts, 2)[1].view(2, 3, 4)
    assert torch.equal(found.credit, credit) and found.weight == 1
