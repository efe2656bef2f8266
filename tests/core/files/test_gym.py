"""Tasks of reasoning-gym as records: their weights, settings and mistakes, and that they are always the same ones."""

import json
import sys
from collections import Counter

import pytest

from core.files.gym import make_rows, read_gym
from core.files.records import load_records
from core.prompts import PromptConsumer
from tests.tiny import CAUSAL

OF_HASHES = ("codeio", "intermediate_integration", "isomorphic_strings", "list_functions", "polynomial_multiplication",
             "ransom_note", "word_ladder")  # tasks that depend on the order of sets


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym")


def entries_of(records):
    return {json.dumps(record["entry"]["question"]) for record in records}


def test_the_records_are_the_entries_of_the_package(gym):
    rows = make_rows("gym:chain_sum", {"size": 5, "seed": 3, "max_terms": 2})
    expected = list(gym.create_dataset("chain_sum", size=5, seed=3, max_terms=2))
    assert sorted(rows, key=lambda row: row["entry"]["metadata"]["source_index"]) == [{"prompt": entry["question"], "answer": entry["answer"], "task": "chain_sum", "entry": entry}
                    for entry in expected]


def test_tasks_are_mixed_by_their_weights_with_settings_for_all_or_one(gym):
    rows = make_rows("gym:gcd+2.5*chain_sum+.5*lcm", {"size": 40, "max_value": 9, "lcm.max_value": 50})
    assert Counter(row["task"] for row in rows) == {"gcd": 10, "chain_sum": 25, "lcm": 5}
    numbers = {task: [max(row["entry"]["metadata"]["numbers"]) for row in rows if row["task"] == task]
               for task in ("gcd", "lcm")}
    assert {row["task"] for row in rows[:20]} == {"gcd", "chain_sum", "lcm"}
    assert max(numbers["gcd"]) <= 9 < max(numbers["lcm"]) <= 50


def test_shots_begin_every_prompt_and_are_not_asked(gym):
    settings = {"size": 20, "max_digits": 1, "max_terms": 2, "shots": 2}
    rows = make_rows("gym:chain_sum", settings)
    expected = gym.create_dataset("chain_sum", size=2, seed=0, max_digits=1, max_terms=2)
    solved = [(entry["question"], entry["answer"]) for entry in expected]
    for row in rows:
        *before, last = [message["content"] for message in row["prompt"]]
        assert list(zip(before[::2], before[1::2], strict=True)) == solved
        assert last == row["entry"]["question"] not in before
        assert [message["role"] for message in row["prompt"]] == ["user", "assistant"] * 2 + ["user"]


@pytest.mark.parametrize("dataset, settings, message", [
    ("gym:leg_countin", {}, "'leg_countin' is no task .*; did you mean leg_counting[?]"),
    ("gym:composite", {}, "'composite' is no task"),
    ("gym:", {}, "'' is no task .*a command that lists them"),
    ("gym:gcd+x*lcm", {}, "'x[*]lcm' is no task of reasoning-gym, nor a weight and a task"),
    ("gym:gcd+0*lcm", {}, "the weight of lcm must be above 0"),
    ("gym:gcd", {"max_valu": 2}, "gym_settings: 'max_valu' is no setting of gcd; did you mean max_value[?]"),
    ("gym:gcd+lcm", {"lcm.x": 2}, "'lcm.x' is no setting of gcd or lcm; they have .*, gcd.max_value, .*size"),
    ("gym:gcd", {1: 2}, "gym_settings: 1 is no setting"),
    ("gym:gcd", {"size": 0}, "gym_settings: size=0 must be a whole number of at least 1"),
    ("gym:gcd", {"max_value": -4}, "gcd with {'max_value': -4} made no problems .max_value must .*; correct gym_sett"),
    ("gym:boxnet", {"shots": 1, "size": 3}, "shots=1 is not for boxnet, whose problems come without an answer")])
def test_a_mistake_is_one_line(gym, dataset, settings, message):
    with pytest.raises(ValueError, match=f"{message}[^\n]*$"):
        make_rows(dataset, settings)


def test_without_the_package_there_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="^dataset=gym:gcd needs the package reasoning_gym: pip install "
                                         "reasoning-gym$"):
        make_rows("gym:gcd", {})


@pytest.mark.slow
def test_every_process_gets_the_same_problems(gym, monkeypatch):
    dataset = f"gym:{'+'.join(OF_HASHES)}"
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.append(read_gym(dataset, {"size": 35}))
    assert found[0] == found[1]


@pytest.mark.slow
def test_training_and_validation_share_no_entry_and_depend_on_the_seeds_alone(gym):
    def batches(run_seed, **settings):
        data = PromptConsumer("gym:chain_sum+lcm", 4, run_seed, tokenizer=CAUSAL,
                              gym_settings={"size": 300} | settings)
        return data, [[r["prompt"] for r in data.problems("train", step)["record"]] for step in range(3)]

    data, first = batches(1)
    train, val = entries_of(data.records["train"]), entries_of(data.records["val"])
    assert not train & val and 10 < len(val) < 60 and len(train) + len(val) > 250
    assert batches(1)[1] == first != batches(2)[1]
    other = batches(1, seed=7)[0]
    assert not entries_of(other.records["train"]) & entries_of(data.records["val"]), "the same side in every data set"


@pytest.mark.slow
def test_records_can_be_loaded_as_any_data_set(gym):
    record, = load_records("gym:rush_hour", {"size": 1})
    assert record.keys() == {"prompt", "task", "entry", "split", "where"} and record["where"] == "gym:rush_hour, row 1"


def test_a_problem_is_on_the_same_side_whatever_is_shown_before_it(gym):
    sides = [{record["entry"]["question"]: record["split"] for record in load_records("gym:gcd", {"size": 60, "shots": n})}
             for n in (0, 2)]
    shared = sides[0].keys() & sides[1].keys()
    assert len(shared) > 40 and all(sides[0][question] == sides[1][question] for question in shared)
