"""How a function becomes a reward, and which arguments it gets."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grpo.reward_functions import registry
from grpo.reward_functions.registry import arguments, column, reward, run_reward
from tests.tiny import Undecoded


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    monkeypatch.setattr(registry, "REWARDS", {})


def texts(**columns):
    return SimpleNamespace(prompts=["p", "p"], completions=["a", "b"], columns=columns)


def test_a_reward_is_registered_as_it_is_and_a_second_of_its_name_is_refused():
    def shout(prompts, completions, **columns):
        return [float(text.isupper()) for text in completions]

    assert reward(shout) is shout
    row = registry.REWARDS["shout"]
    assert (row.fn, row.low, row.high, row.slow, row.whole_group) == (shout, -math.inf, math.inf, False, False)
    assert row.check is None
    assert reward(0, 1, slow=True, check=print)(shout) is shout, "the same function may be loaded again"
    assert registry.REWARDS["shout"].slow and registry.REWARDS["shout"].check is print

    def other(prompts, completions, **columns):
        return [0.0 for _ in completions]

    other.__name__ = "shout"
    with pytest.raises(ValueError, match="reward shout .*already defined"):
        reward(other)


def test_a_function_gets_only_what_its_signature_names():
    @reward
    def only_tokens(*, texts, judge_model, group_size):
        pass

    @reward
    def answers(completions, answer, *, length_min=3, unknown=4):
        pass

    @reward
    def everything(prompts, completions, answer, **columns):
        pass

    known = {"texts": Undecoded(), "judge_model": "a judge", "group_size": 2, "length_min": 7, "length_max": 9}
    assert arguments("only_tokens", Undecoded(), known) == ({}, {"texts": known["texts"], "judge_model": "a judge",
                                                                 "group_size": 2})
    given = texts(answer=["1", "2"], level=[3, 4])
    assert arguments("answers", given, known) == ({"completions": ["a", "b"], "answer": ["1", "2"]}, {"length_min": 7})
    assert arguments("everything", given, known) == (
        {"prompts": ["p", "p"], "completions": ["a", "b"], "answer": ["1", "2"], "level": [3, 4]}, {})


def test_a_setting_wins_over_a_field_of_the_same_name():
    @reward
    def bounded(completions, *, length_min, **columns):
        pass

    fields, settings = arguments("bounded", texts(length_min=[1, 2], level=[3, 4]), {"length_min": 7})
    assert fields == {"completions": ["a", "b"], "level": [3, 4]} and settings == {"length_min": 7}


def test_a_parameter_that_nothing_fills_is_a_missing_field():
    @reward
    def near(prompts, completions, answer, tolerance=0.1):
        pass

    with pytest.raises(ValueError, match="reward near needs the field 'answer' in every record"):
        arguments("near", texts(), {})
    assert set(arguments("near", texts(answer=["1", "2"]), {})[0]) == {"prompts", "completions", "answer"}


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_values_may_be_a_list_or_one_dimensional_array(make):
    registry.REWARDS["f"] = registry.Reward(lambda completions: make([0.5, 1.0]), 0, 1, False, False, None)
    found = run_reward("f", {"completions": ["a", "b"]}, {}, 2)
    assert found == [0.5, 1.0] and all(type(x) is float for x in found)
    with pytest.raises(ValueError, match="reward f returned 2 values for 3 completions"):
        run_reward("f", {"completions": ["a", "b", "c"]}, {}, 3)


def test_values_of_two_dimensions_are_refused():
    registry.REWARDS["f"] = registry.Reward(lambda completions: torch.zeros(2, 1), 0, 1, False, False, None)
    with pytest.raises(ValueError, match=r"reward f returned shape \(2, 1\); return one value for each completion"):
        run_reward("f", {"completions": ["a", "b"]}, {}, 2)


def test_a_column_is_complete_or_an_error():
    def near():
        pass

    assert column(near, {"answer": ["1", "2"]}, "answer") == ["1", "2"]
    for columns in ({}, {"answer": ["1", None]}):
        with pytest.raises(ValueError, match="reward near needs the field 'answer' in every record"):
            column(near, columns, "answer")
