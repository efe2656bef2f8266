"""Each sentence about rewards, and what breaks it."""

from dataclasses import replace

import pytest
import torch

from core.generation import Stop
from grpo.doctor.rewards import (
    empty_completions,
    groups_differ,
    judge_on_true_texts,
    own_answers,
    right_completions,
    values_seen,
)
from grpo.rewards import Scored, reward
from tests.grpo.evaluation.patients import completing, expect, sums

pytestmark = pytest.mark.slow  # it is the number of them that takes the time
ALL, NONE, HALF = [3.5] * 8, [-1.5] * 8, [3.5, -1.5] * 4
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("groups", "verdict", "sentence", "remedy"), [
    ([HALF, HALF, HALF, ALL], True, "The reward is 1.62 on average. Of 4 groups 25% have equal rewards", ""),
    ([ALL, ALL, ALL, HALF], False, "75% have equal rewards", "too easy: take harder problems"),
    ([NONE, NONE, NONE, HALF], False, "75% have equal rewards", "too hard: take easier problems")])
def test_groups_of_equal_rewards_are_found(healthy, groups, verdict, sentence, remedy):
    values = torch.tensor(groups)
    x = replace(healthy, scored=Scored(values, values={"math_number": values.flatten()}))
    expect(groups_differ(x), verdict, sentence, remedy)


@pytest.mark.parametrize(("values", "verdict", "sentence", "remedy"), [
    ([-1.5, 3.5, NAN, 1.0], True, "gave -1.5 to 3.5, 1 on average (possible: [-2.5, 3.5]), and skipped 25%", ""),
    ([NAN, NAN], False, "skipped all 2 completions", "returns None"),
    ([0.5, INF], False, "numbers that are not finite", "return None"),
    ([0.0, 5.0], False, "gave 0 to 5, but declares -2.5 to 3.5", "@reward(-2.5, 5)"),
    ([-1.5, -1.5], False, "gave all 2 completions -1.5: it teaches nothing", "is what it looks for ever there?"),
    ([3.5, 3.5], None, "3.5, its highest value", "leave it out")])
def test_a_reward_that_teaches_nothing_or_leaves_its_range_is_found(healthy, values, verdict, sentence, remedy):
    x = replace(healthy, scored=Scored(torch.zeros(1, len(values)), values={"math_number": torch.tensor(values)}))
    expect(values_seen(x, "math_number"), verdict, sentence, remedy)


def test_verifiers_that_know_the_records_answers_are_fine(healthy, tmp_path):
    expect(own_answers(healthy, "math_number"), True, "finds the records' own answers right: 8 were tried")
    expect(empty_completions(healthy, "math_number"), True, "math_number gives -2.5 at most for an empty completion")
    x = completing(tmp_path, sums(completion=None), reward_functions=("math_answer", "exact_match", "math_format"))
    for name in ("math_answer", "exact_match"):
        expect(own_answers(x, name), True, "8 were tried")
    assert own_answers(x, "math_format") is empty_completions(x, "math_format") is None, "it reads no record"


@pytest.mark.parametrize(("changes", "settings"), [
    ({"answer": "The answer is 8."}, {}), ({"completion": None, "answer": "so it is 8"}, {}),
    ({"completion": None}, {"reward_functions": ("exact_match",), "response_prefix": "="})])
def test_a_verifier_that_rejects_the_records_answers_is_found(tmp_path, changes, settings):
    x = completing(tmp_path, sums(**changes), **settings)
    result = own_answers(x, *x.rewards.names)
    expect(result, False, f"{x.rewards.names[0]} does not find the answer of", "correct the records or the reward")
    assert "records.jsonl, line 2 right: it gives " in result[1]


MINE = """from grpo.rewards import reward

@reward(0, 1)
def in_brackets(prompts, completions, answer):
    return [float(f"[[{a}]]" in text) for text, a in zip(completions, answer)]

@reward(0, 1)
def never_empty(prompts, completions, answer):
    return [float(not text or a in text) for text, a in zip(completions, answer)]

@reward(0, 1)
def fails_on_empty(prompts, completions, answer):
    return [float(text[len(text) - 1] == ">") for text in completions]

@reward(0, 1)
def fails(prompts, completions, answer):
    return [float(int(text) == int(a)) for text, a in zip(completions, answer)]

def good(completions, answer, **kwargs):
    return [float(a in text) for text, a in zip(completions, answer)]

def bad(completions, answer, **kwargs):
    return [-float(a in text) for text, a in zip(completions, answer)]
"""


@pytest.mark.parametrize(("name", "own", "check", "verdict", "sentence", "remedy"), [
    ("in_brackets", False, own_answers, None, "does not find the answer of", "in the form that your function expects"),
    ("good", True, own_answers, True, "8 were tried", ""),
    ("bad", True, own_answers, False, "does not find the answer of", "correct the records"),
    ("fails", True, own_answers, False, "fails on the right answer of", "correct the function"),
    ("never_empty", True, empty_completions, False, "gives its highest value, 1, for an empty", "learn to write"),
    ("fails_on_empty", True, empty_completions, False, "fails on an empty completion", "return 0 or None")])
def test_functions_of_the_user_are_tried_as_trl_and_this_project_call_them(tmp_path, name, own, check, verdict,
                                                                           sentence, remedy):
    (tmp_path / "mine.py").write_text(MINE)
    run = completing(tmp_path, sums() if own else sums(completion=None), reward_file=str(tmp_path / "mine.py"),
                     reward_functions=("math_number", "good", "bad"))
    expect(check(run, name), verdict, sentence, remedy)


def test_records_without_a_right_completion_are_named(tmp_path):
    @reward(0, 1)
    def has_note(prompts, completions, note):
        return [float(n in text) for text, n in zip(completions, note, strict=True)]

    x = completing(tmp_path, sums(completion=None, answer=None, note="x"), reward_functions=("has_note",))
    expect(own_answers(x, "has_note"), None, "was not tried on right completions", "give the records")


def test_a_judge_that_prefers_filled_text_is_found(healthy_fill, monkeypatch):
    expect(judge_on_true_texts(healthy_fill), True, "for the true texts and")
    judge = healthy_fill.models.judge
    scores = judge.scores
    monkeypatch.setattr(judge, "scores", lambda texts: 1 - scores(texts))
    expect(judge_on_true_texts(healthy_fill), False, "for the true texts and", "was trained on texts of this kind")


def test_verifiers_read_the_records_completions_as_those_of_the_model_cut_before_a_stop_sequence(tmp_path):
    run = completing(tmp_path, stop_sequences=("</SOLUTION>", "<end_working_out>"), response_prefix="=")
    stop = Stop(run.data.tokenizer, run.config.stop_sequences, "=")
    for record in run.data.records["train"]:
        right, = right_completions(run, record)
        assert right == stop.text(run.data.tokenizer.encode(record["completion"]))
        assert right.startswith("=<start_working") and "SOLUTION" not in right
