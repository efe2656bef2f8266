"""The reward of reasoning-gym's tasks: their own scores, and answers that are not to be evaluated as Python."""

import inspect
import re
from types import SimpleNamespace

import pytest

from grpo.reward_functions.gym import FORMULA_TASKS, LIST_TASKS, answer_in, gym, is_harmless, score_of
from grpo.reward_functions.reward_log import Log
from grpo.rewards import REWARDS, Rewards
from tests.tiny import config

package = pytest.importorskip("reasoning_gym")
TASKS = sorted(package.factory.DATASETS.keys() - {"composite"})
SLOW = {"arc_agi", "futoshiki", "knight_swap", "quantum_lock", "sokoban", "zebra_puzzles"}  # up to seconds
UNTIDY = ("", " ", "2 and 2", "nan", "inf", "1/0", "[", "{}", "None", "x" * 3000, "(" * 300, "[[1], 2]", "é\0", "9e999",
          "a\nb", "-", "nan-nanj", '{"a": 1}', "()", "x**x", "sin(x)/0")


def scored(task, text, **settings):
    """(score, metrics) of a completion for the first problem of a task."""
    entry = package.create_dataset(task, size=1, seed=0, **settings)[0]
    metrics = {}
    score, = gym([""], [text], [entry["answer"]], [task], [entry], log_metric=metrics.__setitem__)
    return score, metrics


@pytest.mark.parametrize("task", [pytest.param(task, marks=pytest.mark.slow) if task in SLOW else task
                                  for task in TASKS])
def test_the_right_answer_of_every_task_gets_its_highest_score(task):
    entry = package.create_dataset(task, size=1, seed=0)[0]
    answer = entry["answer"]
    if answer is None:
        pytest.skip("the package knows no answer")
    texts = [answer, f"First 7, then 8.\n<answer>5</answer> No: <answer> {answer}\n</answer> 9."]
    log = Log()
    assert gym([""] * 2, texts, [answer] * 2, [task] * 2, [entry] * 2, log_metric=log.log_metric) == [1, 1]
    assert log.metrics == {"gym_unread": (0.0, 2), f"gym_{task}": (2.0, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_an_untidy_answer_is_no_error_and_scores_between_0_and_1(task):
    entry = package.create_dataset(task, size=1, seed=0)[0]
    for text in UNTIDY:
        score = score_of(package, task, answer_in(text, entry["answer"]), entry)
        assert score is None or 0 <= score <= 1, text
    for text in ("", "nan", "nan-nanj", "-NaN"):
        assert score_of(package, task, text, entry) is None


def test_a_part_of_the_score_is_the_tasks_own():
    assert scored("countdown", "1 + 1")[0] == .05
    assert scored("spell_backward", "x")[0] == package.create_dataset("spell_backward", size=1, seed=0).score_answer(
        "x", package.create_dataset("spell_backward", size=1, seed=0)[0])


@pytest.mark.parametrize("text, truth, answer", [
    ("It is 12, or rather -3.5.", "7", "-3.5"), ("none", "7", ""), ("<answer>1, 2</answer> 3", "-2.0", "2"),
    (" red \n", "blue", "red"), ("<answer>\na</answer><answer>b", "x", "a"), ("12 legs", None, "12 legs")])
def test_the_answer_is_the_last_number_where_the_tasks_own_is_one(text, truth, answer):
    assert answer_in(text, truth) == answer


ATTACKS = ("__import__('os').system('touch {}')", "open('{}', 'w')", "[open('{}', 'w')]", "exec(chr(49))",
           "(lambda: open('{}', 'w'))()", "sin(open('{}', 'w'))", "(1).__class__", "[x for x in open('{}', 'w')]",
           "open('{}', 'w')!", "f\"{{open('{}', 'w')}}\"", "['a'] * 9", "'a' * 9", "sqrt(x)(1)", "sin(*[1])", "x := 2")


def test_the_code_of_an_answer_is_never_run(tmp_path):
    for number, attack in enumerate(ATTACKS):
        path = tmp_path / str(number)
        text = attack.format(path)
        for task in (*LIST_TASKS, *FORMULA_TASKS):
            assert not is_harmless(task, text)
            assert scored(task, text)[1]["gym_unread"], (task, text)
            assert not path.exists()
    entry = package.create_dataset("countdown", size=1, seed=0)[0]
    package.create_dataset("countdown", size=1, seed=0).score_answer(ATTACKS[1].format(tmp_path / "run"), entry)
    assert (tmp_path / "run").exists(), "the package itself would have run it"
    for text in ("[[1, 2], ['a', 'b']]", "(1, 2)"):
        assert is_harmless("n_queens", text)
    for text in ("3*(x - 2)**2/5", "-x**2*sin(3*x) + exp(x) + C", "1 + 2*3"):
        assert is_harmless("simple_integration", text)


@pytest.mark.parametrize("form", ["{}", "[{}]", "({}, {})", "[[{}]]"])
def test_a_text_in_a_formula_is_not_evaluated_a_second_time(form, tmp_path):
    """sympy evaluates a text that it finds in a formula."""
    code = repr(f"__import__('os').system('touch {tmp_path / 'run'}')")
    for task in FORMULA_TASKS:
        assert scored(task, form.replace("{}", code))[1]["gym_unread"]
    assert not (tmp_path / "run").exists()


def test_a_task_scores_with_the_settings_of_the_run():
    settings = {"max_date_difference_days": 5, "time_intervals.max_time_difference_seconds": 600}
    made = package.create_dataset("time_intervals", size=1, seed=0, max_date_difference_days=5,
                                  max_time_difference_seconds=600)
    entry = made[0] | {"answer": "00:01:05"}
    assert score_of(package, "time_intervals", "00:05", entry, settings) == made.score_answer("00:05", entry)


def test_the_tasks_that_evaluate_an_answer_are_all_known():
    found = set()
    for task in TASKS:
        scorer = inspect.getsource(package.factory.DATASETS[task][0].score_answer)
        if re.search(r"\b(eval|exec|parse_expr|sympify)\([^e]", scorer):  # number_sorting evaluates the entry's own
            found.add(task)
    assert found == {*LIST_TASKS, *FORMULA_TASKS}


def test_it_needs_processes_with_a_deadline():
    assert REWARDS["gym"].slow
    with pytest.raises(ValueError, match="^reward gym may never be done with an answer, .*: set reward_workers=2"):
        Rewards(config(reward_functions=("gym",)))


@pytest.mark.slow
def test_an_answer_that_takes_for_ever_is_late_and_the_others_are_scored():

    entry = package.create_dataset("countdown", size=1, seed=0)[0]
    rewards = Rewards(config(reward_functions=("gym",), reward_workers=2, reward_timeout=15.0))
    completions = [entry["answer"], "9**9**9**9**9 + 9**9**9**9", "1"]
    columns = {"answer": [entry["answer"]] * 3, "task": ["countdown"] * 3, "entry": [entry] * 3}
    try:
        values, _ = rewards.score(SimpleNamespace(prompts=[""] * 3, completions=completions, columns=columns), 3)
    finally:
        rewards.close()
    right, late, wrong = values["gym"].tolist()
    assert right == 1 and late != late and 0 < wrong < .1
