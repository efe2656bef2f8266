"""How a function becomes a reward, and which arguments it gets."""

import asyncio
import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.files.records import RAW
from grpo.reward_functions import registry
from grpo.reward_functions.registry import arguments, column, reward, run_reward, run_together
from tests.tiny import Undecoded


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    monkeypatch.setattr(registry, "REWARDS", {})
    monkeypatch.setattr(registry, "QUICK_SECONDS", 60.0)  # however busy the machine is


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


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_values_may_be_a_list_or_one_dimensional_array(make):
    registry.REWARDS["f"] = registry.Reward(lambda completions: make([0.5, 1.0]), 0, 1, False, False, None)
    found, _ = run_reward("f", {"completions": ["a", "b"]}, {}, 2)
    assert found == [0.5, 1.0] and all(type(x) is float for x in found)
    with pytest.raises(ValueError, match="reward f returned 2 values for 3 completions"):
        run_reward("f", {"completions": ["a", "b", "c"]}, {}, 3)


def test_values_of_two_dimensions_are_refused():
    registry.REWARDS["f"] = registry.Reward(lambda completions: torch.zeros(2, 1), 0, 1, False, False, None)
    with pytest.raises(ValueError, match=r"reward f returned shape \(2, 1\); return a list of 2 numbers or None"):
        run_reward("f", {"completions": ["a", "b"]}, {}, 2)


@pytest.mark.parametrize(("values", "what"), [
    (None, "None"), (1.0, "1.0"), ("ab", "'ab'"), ({1.0, 2.0}, "{1.0, 2.0}"), (["yes", 1.0], "a list with 'yes'"),
    ([0.5, "1.0"], "a list with '1.0'"), ([[1.0], 2.0], r"a list with \[1.0\]"), ([0.0, 1j], "what .* .*not 'complex'."),
    ([0.0, 10**400], "what cannot be read as numbers .int too large to convert to float."), ((x for x in "ab"), "<generator object .*>")])
def test_what_is_no_list_of_numbers_is_one_line(values, what):
    @reward
    def odd(completions):
        return values

    with pytest.raises(ValueError, match=f"^reward odd returned {what}; return a list of 2 numbers or None .*registry.py, line"):
        run_reward("odd", {"completions": ["a", "b"]}, {}, 2)


def test_values_in_a_list_may_be_any_number():
    @reward
    def numbers(completions):
        return [None, True, 2, np.float32(0.5), torch.tensor(0.25)]

    assert run_reward("numbers", {}, {"completions": ""}, 5)[0] == [None, True, 2, 0.5, 0.25]


def test_a_column_is_complete_or_an_error():
    def near():
        pass

    assert column(near, {"answer": ["1", "2"]}, "answer") == ["1", "2"]
    for columns in ({}, {"answer": ["1", None]}):
        with pytest.raises(ValueError, match="reward near needs the field 'answer' in every record"):
            column(near, columns, "answer")


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

    calls = [(name, {"completions": ["a", "b"]}, {}, 2) for name in ("one", "plain", "two")]
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


def test_an_error_of_an_async_reward_is_the_error_of_the_call():
    @reward
    async def broken(completions):
        raise ValueError("no key")

    with pytest.raises(ValueError, match=": raise ValueError.*: reward broken, completion 'a': ValueError: no key$"):
        run_reward("broken", {"completions": ["a"]}, {}, 1)


# errors of a reward's own code

def test_an_error_names_the_line_the_reward_and_the_first_completion_that_raises_it():
    calls = []

    @reward
    def by_length(prompts, completions, answer):
        calls.append(completions)
        return [1 / len(text) for text in completions]

    fields = {"prompts": ["p", "q" * 99, "r"], "completions": ["a", "", ""], "answer": ["1", "2", "3"]}
    with pytest.raises(ValueError) as found:
        run_reward("by_length", fields, {}, 3)
    assert re.fullmatch(r".*test_registry.py, line \d+: return \[1 / len.text. for text in completions\]: reward "
                        r"by_length, prompt 'q{59}[.]{3}, completion '': ZeroDivisionError: division by zero",
                        str(found.value))
    assert calls == [["a", "", ""], ["a"], [""]]


def test_an_error_that_no_completion_alone_raises_is_one_of_the_call():
    @reward
    def compares(completions):
        if len(completions) > 1:
            raise TypeError("too many")
        return [0.0]

    with pytest.raises(ValueError, match="reward compares, called with 2 completions, the first with completion 'a': "
                                         "TypeError: too many$"):
        run_reward("compares", {"completions": ["a", "b"]}, {}, 2)


def test_an_error_of_another_text_in_the_same_line_is_another_one():
    @reward
    def looks_up(completions):
        return [{"a": 1.0}[text] for text in completions[::-1]]

    with pytest.raises(ValueError, match="reward looks_up, completion 'c': KeyError: 'c'$"):
        run_reward("looks_up", {"completions": ["a", "b", "c"]}, {}, 3)


@pytest.mark.parametrize("fields, shown", [({"answer": ["7", "8"], "level": [1, 2], "topic": ["x", "y"]},
                                            ", the first with answer '7', level 1"), ({}, "")])
def test_a_reward_that_reads_no_texts_is_described_by_what_it_got(fields, shown):
    @reward
    def reads_no_texts(**columns):
        raise KeyError(len(columns.get("answer", ())))

    with pytest.raises(ValueError, match=f"reward reads_no_texts, called with 2 completions{shown}: KeyError: .$"):
        run_reward("reads_no_texts", fields, {}, 2)
    if fields:
        with pytest.raises(ValueError, match="reward reads_no_texts, answer '7', level 1: KeyError: 1$"):
            run_reward("reads_no_texts", {key: x[:1] for key, x in fields.items()}, {}, 1)


def test_a_reward_that_empties_its_list_empties_no_other_ones():
    @reward
    def empties(completions):
        completions.clear()
        raise KeyError("all gone")

    completions = ["a", "b"]
    with pytest.raises(ValueError, match="reward empties, completion 'a': KeyError: 'all gone'$"):
        run_reward("empties", {"completions": completions}, {}, 2)
    assert completions == ["a", "b"]


@pytest.mark.parametrize("kind", ["compares completions", "slow to fail", "async"])
def test_an_error_is_not_searched_where_a_second_call_may_cost_or_means_something_else(kind, monkeypatch):
    calls = []
    if kind == "slow to fail":
        monkeypatch.setattr(registry, "QUICK_SECONDS", -1.0)

    def fails(completions):
        calls.append(completions)
        raise KeyError("no")

    async def waits(completions):
        fails(completions)

    reward(whole_group=kind == "compares completions")(fails)
    reward(waits)
    name = "waits" if kind == "async" else "fails"
    with pytest.raises(ValueError, match=f"reward {name}, called with 2 completions, the first with completion 'a': "):
        run_reward(name, {"completions": ["a", "b"]}, {}, 2)
    assert calls == [["a", "b"]]


def test_a_reward_that_exits_does_not_end_the_process():
    @reward
    def ends(completions):
        sys.exit(3)

    with pytest.raises(ValueError, match="sys.exit.3.: reward ends, completion 'a': SystemExit: 3$"):
        run_reward("ends", {"completions": ["a", "b"]}, {}, 2)


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
