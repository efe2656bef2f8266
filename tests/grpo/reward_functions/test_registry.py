"""How a function becomes a reward, which arguments it gets, and how its return value is read."""

import asyncio
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.files.records import RAW
from grpo.reward_functions import registry
from grpo.reward_functions.registry import Call, Reward, arguments, reward, run_reward, run_together


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    monkeypatch.setattr(registry, "REWARDS", {})


def texts(**columns):
    return SimpleNamespace(prompts=["p", "p"], completions=["a", "b"], completion_ids=[[1], [2, 3]], columns=columns)


def test_a_reward_is_registered_as_it_is_and_one_of_another_file_with_its_name_is_refused():
    def shout(completions):
        return [float(text.isupper()) for text in completions]

    assert reward(shout) is shout and reward(0, 1, slow=True, check=print)(shout) is shout, "it may be loaded again"
    assert registry.REWARDS["shout"] == Reward(shout, 0, 1, True, False, print)

    def other(completions):
        pass

    other.__name__, other.__module__ = "shout", "another_file"
    with pytest.raises(ValueError, match="reward shout of another_file is already defined in .*test_registry"):
        reward(other)


def of_tokens(*, texts, judge_model, group_size):
    pass


def answers(completions, answer, *, length_min=3, unknown=4):
    pass


def everything(prompts, completions, answer, **columns):
    pass


def bounded(completions, *, length_min, **columns):
    pass


def of_the_run(completion_ids, trainer_state=None, *, log_metric, log_extra=None):
    log_metric("length", sum(map(len, completion_ids)))
    log_extra("first", [ids[0] for ids in completion_ids])
    return [trainer_state for _ in completion_ids]


KNOWN = {"texts": "the texts", "judge_model": "a judge", "group_size": 2, "length_min": 7, "trainer_state": 5.0}
TEXTS, COLUMNS = {"completions": ["a", "b"]}, {"answer": ["1", "2"], "level": [3, 4]}


@pytest.mark.parametrize(("function", "columns", "fields", "settings"), [
    (of_tokens, COLUMNS, {}, {"texts": "the texts", "judge_model": "a judge", "group_size": 2}),
    (answers, COLUMNS, TEXTS | {"answer": ["1", "2"]}, {"length_min": 7}),
    (everything, COLUMNS, TEXTS | COLUMNS | {"prompts": ["p", "p"]}, {}),
    (bounded, {"length_min": [1, 2]} | COLUMNS, TEXTS | COLUMNS, {"length_min": 7}),  # the setting wins over a field
    (everything, {RAW: [1, 2], "prompt": ["q", "q"], "log_metric": ["a", "b"], "trainer_state": ["a", "b"]} | COLUMNS,
     TEXTS | COLUMNS | {"prompts": ["p", "p"]}, {}),
    (of_the_run, COLUMNS, {"completion_ids": [[1], [2, 3]]}, {"trainer_state": 5.0})])
def test_a_function_gets_only_what_its_signature_names(function, columns, fields, settings):
    reward(function)
    assert arguments(function.__name__, texts(**columns), KNOWN) == (fields, settings)
    if function is of_the_run:
        values, log = run_reward("of_the_run", fields, settings, 2)
        assert values == [5.0, 5.0] and log.metrics == {"length": (3.0, 1)} and log.columns == {"first": [1, 2]}


def test_a_parameter_that_nothing_fills_is_a_missing_field():
    reward(answers)
    with pytest.raises(ValueError, match="reward answers needs the field 'answer' in every record"):
        arguments("answers", texts(), {})


def returned(values, N=2):
    """The values that a reward returns, as they are read."""
    @reward
    def odd(completions):
        return values

    return run_reward("odd", {"completions": ["a", "b"]}, {}, N)[0]


@pytest.mark.parametrize("values", [
    (0.5, 1.0), np.array([0.5, 1.0]), torch.tensor([0.5, 1.0]), [np.float32(0.5), torch.tensor(1.0)], [0.5, True]])
def test_values_may_be_a_list_or_an_array_of_any_numbers(values):
    assert returned(values) == [0.5, 1.0] and all(type(x) is float for x in returned(values))


def test_nan_is_a_skipped_completion_and_infinity_a_value_that_is_not_finite():
    skipped, *others = returned([None, math.nan, -math.inf, 1.0], 4)
    assert math.isnan(skipped) and others == [math.inf, math.inf, 1.0]


@pytest.mark.parametrize(("values", "message"), [
    *((values, "something that is no list of numbers .*") for values in (
        None, 1.0, "ab", ["yes", 1.0], [[1.0], 2.0], [0.0, 1j], torch.zeros(2, 1), [0.0, 10**400])),
    ([1.0], "1 values for 2 completions")])
def test_what_is_no_list_of_numbers_is_one_line(values, message):
    with pytest.raises(ValueError, match=f"^reward odd returned {message}; return a list of 2 numbers or None "
                                         r"\(.*test_registry.py, line [0-9]+\)$"):
        returned(values)


def test_a_column_may_be_logged_in_parts_and_has_a_value_for_each_completion():
    @reward
    def one_by_one(completions, log_extra):
        for text in completions[: len(completions) - ("b" in completions)]:
            log_extra("upper", [text.upper()])
        return [0.0] * len(completions)

    log = run_reward("one_by_one", {"completions": ["a", "c"]}, {}, 2)[1]
    assert log.columns == {"upper": ["A", "C"]} and log.extra(1) == {"upper": "C"}
    with pytest.raises(ValueError, match=r"reward one_by_one: log_extra\('upper', ...\) got 1 values for 2 completions"):
        run_reward("one_by_one", {"completions": ["a", "b"]}, {}, 2)


# async def

def test_async_rewards_run_at_the_same_time_and_others_as_usual():
    """Each of the two waits for the other to begin: one after the other they would never end."""
    begun = {}

    async def meet(mine, other):
        begun.setdefault(mine, asyncio.Event()).set()
        await asyncio.wait_for(begun.setdefault(other, asyncio.Event()).wait(), 60)

    @reward
    async def one(completions):
        await meet("one", "two")
        return [1.0 for _ in completions]

    @reward
    async def two(completions, log_metric):
        await meet("two", "one")
        log_metric("seen", len(completions))
        return torch.tensor([2.0] * len(completions))

    @reward
    def plain(completions):
        return [3.0 for _ in completions]

    found = run_together([Call(name, {"completions": ["a", "b"]}, {}, 2) for name in ("one", "plain", "two")])
    assert {name: (values, log.metrics) for name, (values, log) in found.items()} == {
        "one": ([1.0, 1.0], {}), "plain": ([3.0, 3.0], {}), "two": ([2.0, 2.0], {"seen": (2.0, 1)})}


def test_an_async_reward_keeps_its_event_loop_and_works_where_another_is_running():
    loops = []

    @reward
    async def waits(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0 for _ in completions]

    async def notebook():
        return run_reward("waits", {"completions": ["a"]}, {}, 1)[0]

    assert run_reward("waits", {"completions": ["a"]}, {}, 1)[0] == asyncio.run(notebook()) == [1.0]
    assert loops[0] is loops[1], "a connection that belongs to the loop stays open"


# errors of a reward's own code

def divides(completions):
    return [1 / len(text) for text in completions]


def ends(completions):
    sys.exit(3)


async def looks_up(completions):
    return [{"a": 1.0}[text] for text in completions]


@pytest.mark.parametrize(("function", "line", "what"), [
    (divides, r"return \[1 / len", "ZeroDivisionError: division by zero"), (ends, "sys.exit.3.", "SystemExit: 3"),
    (looks_up, "return .*a.: 1.0", "KeyError: ''")])
def test_an_error_names_the_line_and_the_reward(function, line, what):
    reward(function)
    name = function.__name__
    with pytest.raises(ValueError, match=f"^.*test_registry.py, line [0-9]+: {line}.*: reward {name}: {what}$"):
        run_reward(name, {"completions": ["a", ""]}, {}, 2)


# reward_file

def test_a_reward_file_imports_its_neighbours_and_gives_the_functions_that_it_has(tmp_path):
    (tmp_path / "neighbour_of_rewards.py").write_text("POINTS = 0.5\n")
    mine, path = tmp_path / "mine.py", list(sys.path)
    mine.write_text("from grpo.reward_functions.registry import reward\nfrom neighbour_of_rewards import POINTS\n\n"
                    "class Kind: pass\n\n@reward(0, 1)\ndef decorated(completions): return []\n\n"
                    "def half(completions): return [POINTS for _ in completions]\n")
    found = registry.load_reward_file(str(mine))
    assert set(found) == {"reward", "decorated", "half", "Kind"} and set(registry.REWARDS) == {"decorated"}
    assert found["half"](["a"]) == [0.5] and registry.load_reward_file(None) == {}
    mine.write_text("import package_that_nobody_has\n")
    with pytest.raises(ValueError, match="mine.py, line 1: import package_.*: No module named 'package_that_nobody_has'"):
        registry.load_reward_file(str(mine))
    assert sys.path == path
