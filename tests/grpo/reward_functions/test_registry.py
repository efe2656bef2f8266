"""How a function becomes a reward, and which arguments it gets."""

import asyncio
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.files.records import RAW
from grpo.reward_functions import registry
from grpo.reward_functions.registry import arguments, reward, run_reward, run_together
from tests.tiny import Undecoded


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    monkeypatch.setattr(registry, "REWARDS", {})


def texts(**columns):
    return SimpleNamespace(prompts=["p", "p"], completions=["a", "b"], completion_ids=[[1], [2, 3]], columns=columns)


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


@pytest.mark.parametrize("values", [
    [0.5, 1.0], (0.5, 1.0), np.array([0.5, 1.0]), torch.tensor([0.5, 1.0]), [np.float32(0.5), torch.tensor(1.0)],
    [0.5, True]])
def test_values_may_be_a_list_or_an_array_of_any_numbers(values):
    @reward
    def f():
        return values

    found, _ = run_reward("f", {}, {}, 2)
    assert found == [0.5, 1.0] and all(type(x) is float for x in found)
    with pytest.raises(ValueError, match="^reward f returned 2 values for 3 completions; return a list of 3 numbers"):
        run_reward("f", {}, {}, 3)


@pytest.mark.parametrize(("values", "what"), [
    (None, "None"), (1.0, "1.0"), ("ab", "'ab'"), ({1.0, 2.0}, "{1.0, 2.0}"), (["yes", 1.0], r"\['yes', 1.0\]"),
    ([[1.0], 2.0], r"\[\[1.0\], 2.0\]"), ([0.0, 1j], "what .* .*not 'complex'."), (torch.zeros(2, 1), "tensor.*"),
    ([0.0, 10**400], "what cannot be read as numbers .int too large to convert to float."),
    ((x for x in "ab"), "<generator object .*>")])
def test_what_is_no_list_of_numbers_is_one_line(values, what):
    @reward
    def odd(completions):
        return values

    with pytest.raises(ValueError, match=f"^reward odd returned {what}; return a list of 2 numbers or None .*registry.py, line"):
        run_reward("odd", {"completions": ["a", "b"]}, {}, 2)


def test_ids_state_and_logging_are_given_in_any_place_of_a_signature():
    @reward
    def by_name(completion_ids, trainer_state=None, *, log_metric, log_extra=None):
        log_metric("length", sum(map(len, completion_ids)))
        log_extra("first", [ids[0] for ids in completion_ids])
        return [trainer_state for _ in completion_ids]

    fields, settings = arguments("by_name", texts(), {"trainer_state": 7.0, "length_min": 1})
    assert (fields, settings) == ({"completion_ids": [[1], [2, 3]]}, {"trainer_state": 7.0})
    values, log = run_reward("by_name", fields, settings, 2)
    assert values == [7.0, 7.0] and log.metrics == {"length": (3.0, 1)} and log.columns == {"first": [1, 2]}


def test_a_reward_of_ours_that_takes_all_columns_gets_neither_the_own_prompt_nor_what_it_does_not_name():
    @reward
    def everything(completions, **columns):
        pass

    given = texts(**{RAW: [1, 2]}, prompt=["q", "q"], answer=["1", "2"], log_metric=["a", "b"])
    fields, settings = arguments("everything", given, {"trainer_state": 7})
    assert fields == {"completions": ["a", "b"], "answer": ["1", "2"]} and settings == {}


def test_a_column_may_be_logged_in_parts_and_has_a_value_for_each_completion():
    @reward
    def one_by_one(completions, log_extra):
        for text in completions:
            log_extra("upper", [text.upper()])
        return [0.0] * len(completions)

    @reward
    def too_few(completions, log_extra):
        log_extra("upper", ["A"])
        return [0.0] * len(completions)

    log = run_reward("one_by_one", {"completions": ["a", "b"]}, {}, 2)[1]
    assert log.columns == {"upper": ["A", "B"]} and log.extra(1) == {"upper": "B"}
    with pytest.raises(ValueError, match=r"reward too_few: log_extra\('upper', ...\) got 1 values for 2 completions"):
        run_reward("too_few", {"completions": ["a", "b"]}, {}, 2)


# async def

def test_async_rewards_run_at_the_same_time_and_others_as_usual():
    """Each of the two waits for the other to begin: one after the other they would never end."""
    begun = {}

    async def meet(mine, other):
        begun.setdefault(mine, asyncio.Event()).set()
        await asyncio.wait_for(begun.setdefault(other, asyncio.Event()).wait(), 10)

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

    calls = [registry.Call(name, {"completions": ["a", "b"]}, {}, 2) for name in ("one", "plain", "two")]
    found = run_together(calls)
    assert [values for values, _ in found] == [[1.0, 1.0], [3.0, 3.0], [2.0, 2.0]]
    assert [log.metrics for _, log in found] == [{}, {}, {"seen": (2.0, 1)}]


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


def compares(**columns):
    raise ValueError("no key")


@pytest.mark.parametrize(("function", "line", "what"), [
    (divides, r"return \[1 / len", "ZeroDivisionError: division by zero"), (ends, "sys.exit.3.", "SystemExit: 3"),
    (looks_up, "return .*a.: 1.0", "KeyError: ''"), (compares, "raise ValueError", "ValueError: no key")])
def test_an_error_names_the_line_and_the_reward_and_the_function_is_not_called_again(function, line, what):
    reward(function)
    name = function.__name__
    with pytest.raises(ValueError, match=f"^.*test_registry.py, line [0-9]+: {line}.*: reward {name}: {what}$"):
        run_reward(name, {"completions": ["a", ""]}, {}, 2)


def test_a_reward_may_change_its_lists():
    @reward
    def empties(completions):
        return [0.0 for _ in range(len(completions)) if completions.pop()]

    completions = ["a", "b"]
    assert run_reward("empties", {"completions": completions}, {}, 2)[0] == [0.0, 0.0]
    assert completions == ["a", "b"]


# reward_file

def test_a_reward_file_gives_what_it_can_call_and_registers_what_is_decorated(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("from grpo.reward_functions.registry import reward\n\nCONSTANT = 3\n\nclass Kind: pass\n\n"
                    "@reward(0, 1)\ndef decorated(completions): return []\n\ndef bare(completions): return []\n")
    found = registry.load_reward_file(str(mine))
    assert {"decorated", "bare"} <= set(found) and not {"CONSTANT", "Kind"} & set(found)
    assert set(registry.REWARDS) == {"decorated"}
    assert registry.load_reward_file(None) == {}


def test_a_reward_file_imports_its_neighbours_and_a_missing_package_is_one_line(tmp_path):
    (tmp_path / "neighbour_of_rewards.py").write_text("POINTS = 0.5\n")
    mine, path = tmp_path / "mine.py", list(sys.path)
    mine.write_text("from neighbour_of_rewards import POINTS\n"
                    "def half(completions): return [POINTS for _ in completions]\n")
    assert registry.load_reward_file(str(mine))["half"](["a"]) == [0.5]
    mine.write_text("import package_that_nobody_has\n")
    with pytest.raises(ValueError, match=r"reward_file=.*mine.py cannot be run \(No module named "
                                         r"'package_that_nobody_has'\); pip install what it needs") as found:
        registry.load_reward_file(str(mine))
    assert "\n" not in str(found.value) and sys.path == path
