"""Tasks of reasoning-gym: their records, their own scores as a reward, and answers that are not to be evaluated."""

import inspect
import json
import os
import re

import pytest

from core.records import read_records
from grpo.reward_functions.registry import load_reward_file
from tests.tiny import ROOT, run_here

package = pytest.importorskip("reasoning_gym")
# Their grids are tuples, which a file does not keep
TASKS = sorted(package.factory.DATASETS.keys() - {"composite", "arc_agi", "rearc"})
SLOW = {"futoshiki", "knight_swap", "quantum_lock", "sokoban", "zebra_puzzles"}  # up to seconds
UNTIDY = ("", " ", "2 and 2", "nan", "inf", "1/0", "[", "{}", "None", "x" * 3000, "(" * 300, "[[1], 2]", "é\0", "9e999",
          "a\nb", "-", "nan-nanj", '{"a": 1}', "()", "x**x", "sin(x)/0")
FOUND = load_reward_file(os.path.join(ROOT, "data", "gym", "reward.py"))
gym, answer_in, score_of, is_harmless = (FOUND[name] for name in ("gym", "answer_in", "score_of", "is_harmless"))
LIST_TASKS, FORMULA_TASKS = (gym.__globals__[name] for name in ("LIST_TASKS", "FORMULA_TASKS"))


def scored(task, text):
    """(score, metrics) of a completion for the first problem of a task, as a file has it."""
    entry = json.loads(json.dumps(package.create_dataset(task, size=1, seed=0)[0]))
    metrics = {}
    score, = gym([""], [text], [task], [entry], [{}], log_metric=metrics.__setitem__)
    return score, metrics


def test_the_records_are_the_entries_of_the_package_behind_solved_ones(tmp_path):
    done = run_here("data/gym/prepare.py", "--tasks=chain_sum", "--size=40", "--seed=3", f"--out={tmp_path}",
                    "--settings={'chain_sum': {'max_terms': 2}}")
    assert done.returncode == 0, done.stderr
    records = read_records(str(tmp_path / "prompts.jsonl"))
    entries = json.loads(json.dumps(list(package.create_dataset("chain_sum", size=42, seed=3, max_terms=2))))
    assert {r["entry"]["question"]: r["entry"] for r in records} == {e["question"]: e for e in entries[2:]}
    for record in records:
        *before, last = [message["content"] for message in record["prompt"]]
        assert before == [entry[key] for entry in entries[:2] for key in ("question", "answer")]
        assert last == record["entry"]["question"] and record["task"] == "chain_sum"


@pytest.mark.parametrize("task", [pytest.param(task, marks=pytest.mark.slow) if task in SLOW else task
                                  for task in TASKS])
def test_the_right_answer_of_every_task_gets_its_highest_score(task):
    answer = package.create_dataset(task, size=1, seed=0)[0]["answer"]
    if answer is None:
        pytest.skip("the package knows no answer")
    for text in (answer, f"First 7, then 8.\n<answer>5</answer> No: <answer> {answer}\n</answer> 9."):
        assert scored(task, text) == (1, {"gym_unread": False, f"gym_{task}": 1})


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_an_untidy_answer_is_no_error_and_scores_between_0_and_1(task):
    entry = package.create_dataset(task, size=1, seed=0)[0]
    for text in UNTIDY:
        score = score_of(task, answer_in(text, entry["answer"]), entry, {})
        assert score is None or 0 <= score <= 1, text
    for text in ("", "nan", "nan-nanj", "-NaN"):
        assert score_of(task, text, entry, {}) is None


def test_the_score_is_the_tasks_own_with_its_settings():
    settings = {"max_date_difference_days": 5, "max_time_difference_seconds": 600}
    made = package.create_dataset("time_intervals", size=1, seed=0, **settings)
    entry = made[0] | {"answer": "00:01:05"}
    assert score_of("time_intervals", "00:05", entry, settings) == made.score_answer("00:05", entry)


@pytest.mark.parametrize("text, truth, answer", [
    ("It is 12, or rather -3.5.", "7", "-3.5"), ("none", "7", ""), ("<answer>1, 2</answer> 3", "-2.0", "2"),
    (" red \n", "blue", "red"), ("<answer>\na</answer><answer>b", "x", "a"), ("12 legs", None, "12 legs")])
def test_the_answer_is_the_last_number_where_the_tasks_own_is_one(text, truth, answer):
    assert answer_in(text, truth) == answer


TEXT = repr("__import__('os').system('touch {}')")  # sympy evaluates a text that it finds in a formula
ATTACKS = ("__import__('os').system('touch {}')", "open('{}', 'w')", "[open('{}', 'w')]", "exec(chr(49))",
           "(lambda: open('{}', 'w'))()", "sin(open('{}', 'w'))", "(1).__class__", "[x for x in open('{}', 'w')]",
           "open('{}', 'w')!", "f\"{open('{}', 'w')}\"", "['a'] * 9", "'a' * 9", "sqrt(x)(1)", "sin(*[1])", "x := 2")
OF_FORMULAS = (TEXT, f"[{TEXT}]", f"({TEXT}, {TEXT})", f"[[{TEXT}]]")


def test_the_code_of_an_answer_is_never_run(tmp_path):
    path = tmp_path / "run"
    for task in (*LIST_TASKS, *FORMULA_TASKS):
        for attack in (*ATTACKS, *(OF_FORMULAS if task in FORMULA_TASKS else ())):
            text = attack.replace("{}", str(path))
            assert scored(task, text)[1]["gym_unread"] and not path.exists(), (task, text)
    task = package.create_dataset("countdown", size=1, seed=0)
    task.score_answer(ATTACKS[1].format(path), task[0])
    assert path.exists(), "the package itself would have run it"
    assert is_harmless("n_queens", "[[1, 2], ['a', 'b']]")
    assert is_harmless("simple_integration", "-x**2*sin(3*x) + exp(x) + C")


def test_the_tasks_that_evaluate_an_answer_are_all_known():
    scorers = {task: inspect.getsource(package.factory.DATASETS[task][0].score_answer) for task in TASKS}
    found = {task for task, scorer in scorers.items()
             if re.search(r"\b(eval|exec|parse_expr|sympify)\([^e]", scorer)}
    # number_sorting evaluates the entry's own
    assert found == {*LIST_TASKS, *FORMULA_TASKS}
