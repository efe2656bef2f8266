"""Each sentence about rewards, and what breaks it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from core.generation import Stop
from grpo.doctor.rewards import (
    empty_completions,
    expected_equal_groups,
    groups_differ,
    judge_on_true_texts,
    own_answers,
    right_examples,
    values_seen,
)
from grpo.rewards import Scored, reward
from tests.grpo.evaluation.patients import completing, examined, expect, filling, sums, unexamined

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return examined(completing(tmp_path_factory.mktemp("healthy")))


def with_values(x, right):
    """The examination, as if these completions (P, 8) had been right and no other been sampled."""
    right = torch.tensor(right).float()
    values = torch.where(right == 1, 3.5, -1.5).flatten()
    sampled = [(x.sampled[0][0], Scored(values.view(right.shape), values={"math_number": values}))]
    return SimpleNamespace(**vars(x) | {"sampled": sampled})


ALL, NONE, HALF = [1] * 8, [0] * 8, [1, 0] * 4


def test_groups_of_equal_rewards_are_found(healthy):
    expect(groups_differ(with_values(healthy, [HALF, HALF, HALF, ALL])), True,
           "is 1.62 on average over 4 problems; within a group its standard deviation is 2. 25% of the groups")
    expect(groups_differ(with_values(healthy, [ALL, ALL, ALL, HALF])), False, "75% of the groups", "too easy")
    expect(groups_differ(with_values(healthy, [NONE, NONE, HALF])), False, "67% of the groups", "too hard")


def test_completions_without_any_reward_are_found(healthy):
    x = replace(healthy, sampled=[(healthy.sampled[0][0], Scored(torch.full((4, 8), torch.nan)))])
    expect(groups_differ(x), False, "No completion got a reward")


def test_the_expected_share_of_groups_that_teach_nothing_is_that_of_the_success_rates(healthy):
    result = expected_equal_groups(with_values(healthy, [HALF, HALF, ALL, NONE]))
    p = torch.tensor([4.5, 4.5, 8.5, 0.5]) / 9
    share, twice = (float((p**G + (1 - p) ** G).mean()) for G in (8, 16))
    expect(result, True, f"finds 50% of the completions right. At that rate {share:.0%} of the groups of 8 will be all "
                         f"right or all wrong, {twice:.0%} of groups of 16")
    assert f"{share:.0%}" == "32%"


@pytest.mark.parametrize(("group", "remedy"), [(ALL, "too easy: take harder problems"),
                                               (NONE, "too hard: take easier problems")])
def test_problems_that_are_too_easy_or_too_hard_are_found(healthy, group, remedy):
    expect(expected_equal_groups(with_values(healthy, [group] * 4)), False, "100% of the groups of 8", remedy)


def test_other_rewards_may_tell_equally_right_completions_apart(tmp_path):
    x = unexamined(completing(tmp_path, reward_functions=("math_number", "length_penalty")))
    expect(expected_equal_groups(with_values(x, [ALL] * 4)), None, "the other rewards may still tell them apart")


def test_a_run_without_a_success_reward_has_no_expected_share(tmp_path):
    assert expected_equal_groups(examined(completing(tmp_path, reward_functions=(), task_type="general"))) is None


def test_a_reward_that_is_always_the_same_is_found(healthy):
    expect(values_seen(healthy, "math_number"), True, "math_number gave -")
    expect(values_seen(with_values(healthy, [NONE]), "math_number"), False,
           "math_number gave all 8 completions -1.5: it teaches nothing", "is what it looks for ever there?")
    expect(values_seen(with_values(healthy, [ALL]), "math_number"), None, "3.5, its highest value", "leave it out")


def test_a_constant_reward_of_a_file_is_found_by_its_name(tmp_path):
    @reward(0, 1)
    def always_half(prompts, completions, **columns):
        return [0.5] * len(completions)

    x = examined(completing(tmp_path, reward_functions=("math_number", "always_half")))
    expect(values_seen(x, "always_half"), False, "always_half gave all")
    assert values_seen(x, "math_number")[0] is True


def test_a_reward_outside_its_range_is_found(tmp_path):
    @reward(0, 1)
    def too_high(prompts, completions, **columns):
        return [float(len(text) % 3) for text in completions]

    x = examined(completing(tmp_path, reward_functions=("too_high",)))
    expect(values_seen(x, "too_high"), False, "too_high gave 0 to 2, but declares 0 to 1", "@reward(0, 2)")


def test_a_reward_that_is_not_finite_is_found(healthy):
    infinite = Scored(torch.zeros(1, 2), values={"length_penalty": torch.tensor([0.5, torch.inf])})
    x = replace(healthy, sampled=[(None, infinite)])
    expect(values_seen(x, "length_penalty"), False, "numbers that are not finite", "return None")


def test_skipped_completions_are_told(tmp_path):
    @reward(0, 1)
    def skips_all(prompts, completions, **columns):
        return [None] * len(completions)

    @reward(0, 1)
    def skips_half(prompts, completions, **columns):
        return [None if i % 2 else i % 4 / 2 for i, _ in enumerate(completions)]

    x = examined(completing(tmp_path, reward_functions=("skips_all", "skips_half")))
    expect(values_seen(x, "skips_all"), False, "skips_all skipped all", "returns None")
    assert "It skipped" in values_seen(x, "skips_half")[1]


def test_a_verifier_finds_the_records_completions_right(healthy):
    expect(own_answers(healthy, "math_number"), True, "its highest value, 3.5, for the records' own completions: 8")


def test_a_verifier_that_rejects_right_completions_is_found(tmp_path):
    records = [record | {"answer": f"The answer is {record['answer']}."} for record in sums()]
    x = unexamined(completing(tmp_path, records))
    result = own_answers(x, "math_number")
    expect(result, False, "does not find 8 of 8 of the records' own completions right: it gives -1.5 of 3.5", "correct")
    assert "records.jsonl, line 2" in result[1]


def test_answers_are_tried_in_the_forms_of_the_rewards(tmp_path):
    x = unexamined(completing(tmp_path, sums(completion=None), reward_functions=("math_answer", "exact_match")))
    expect(own_answers(x, "math_answer"), True, "the records' own answers (between tags): 8 were tried")
    expect(own_answers(x, "exact_match"), True, "the records' own answers (alone): 8 were tried")
    sentences = [record | {"answer": f"so it is {record['answer']}"} for record in sums(completion=None)]
    x = unexamined(completing(tmp_path, sentences))
    expect(own_answers(x, "math_number"), False, "does not find 8 of 8 of the records' own answers")


def test_a_prefix_that_no_right_completion_has_is_found(tmp_path):
    x = unexamined(completing(tmp_path, sums(completion=None), reward_functions=("exact_match",), response_prefix="="))
    expect(own_answers(x, "exact_match"), False, "does not find 8 of 8 of the records' own answers")


def test_a_form_that_is_not_known_is_not_called_wrong(tmp_path):
    @reward(0, 1)
    def in_brackets(prompts, completions, answer):
        return [float(f"[[{a}]]" in text) for text, a in zip(completions, answer, strict=True)]

    settings = {"reward_functions": ("in_brackets",)}
    x = unexamined(completing(tmp_path, sums(completion=None), **settings))
    expect(own_answers(x, "in_brackets"), None, "does not find 8 of 8", "give the records a completion that is right")


def test_records_without_a_right_completion_are_told(tmp_path):
    @reward(0, 1)
    def has_note(prompts, completions, note):
        return [float(n in text) for text, n in zip(completions, note, strict=True)]

    records = sums(completion=None, answer=None, note="x")
    x = unexamined(completing(tmp_path, records, reward_functions=("has_note",)))
    expect(own_answers(x, "has_note"), None, "was not tried on right completions", "give the records")


def test_a_reward_that_reads_no_record_is_no_verifier(tmp_path):
    x = unexamined(completing(tmp_path, reward_functions=("math_format", "math_number")))
    assert own_answers(x, "math_format") is None and empty_completions(x, "math_format") is None


def test_a_function_as_trl_calls_it_needs_more_for_right_than_for_empty(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def good(completions, answer, **kwargs):\n"
                    "    return [float(a in text) for text, a in zip(completions, answer)]\n"
                    "def bad(completions, answer, **kwargs):\n"
                    "    return [-float(a in text) for text, a in zip(completions, answer)]\n")
    x = unexamined(completing(tmp_path, reward_file=str(path), reward_functions=("good", "bad")))
    expect(own_answers(x, "good"), True, "more than for an empty completion for the records' own completions")
    expect(own_answers(x, "bad"), False, "bad does not find 8 of 8")


def test_a_verifier_that_an_empty_completion_satisfies_is_found(tmp_path, healthy):
    expect(empty_completions(healthy, "math_number"), True, "math_number gives -2.5 at most for an empty completion")

    @reward(0, 1)
    def begins(prompts, completions, answer):
        return [float(text.find(a) != 0 or a in text) for text, a in zip(completions, answer, strict=True)]

    x = unexamined(completing(tmp_path, reward_functions=("begins", "math_number")))
    expect(empty_completions(x, "begins"), False, "gives its highest value, 1, for an empty", "learn to write nothing")


def test_a_verifier_that_fails_on_an_empty_completion_is_found(tmp_path):
    @reward(0, 1)
    def last_character(prompts, completions, answer):
        return [float(text[len(text) - 1] == ">") for text in completions]

    run = completing(tmp_path, reward_functions=("math_number",))
    x = unexamined(run)
    run.rewards.names = ("last_character",)
    expect(empty_completions(x, "last_character"), False, "last_character fails on an empty completion",
           "return 0 or None")


def test_a_verifier_that_fails_on_a_right_completion_is_found(tmp_path):
    @reward(0, 1)
    def needs_a_number(prompts, completions, answer):
        return [float(int(text) == int(a)) for text, a in zip(completions, answer, strict=True)]

    x = unexamined(completing(tmp_path))
    expect(own_answers(x, "needs_a_number"), False, "fails on '<start_working_out>", "correct the function")


def test_a_judge_that_prefers_filled_text_is_found(tmp_path):
    run = filling(tmp_path)
    x = examined(run)
    expect(judge_on_true_texts(x), True, "for the true texts and")
    scores = run.models.judge.scores
    run.models.judge.scores = lambda texts: 1 - scores(texts)
    expect(judge_on_true_texts(x), False, "for the true texts and", "was trained on texts of this kind")


def test_a_verifier_of_fill_in_gets_the_true_text(tmp_path):
    @reward(0, 1)
    def share_right(prompts, completions, answer):
        return [sum(map(str.__eq__, text, a)) / len(a) for text, a in zip(completions, answer, strict=True)]

    @reward(0, 1)
    def never(prompts, completions, answer):
        return [0.5 * float(text == a) for text, a in zip(completions, answer, strict=True)]

    x = examined(filling(tmp_path, reward_functions=("share_right", "never")))
    expect(own_answers(x, "share_right"), True, "for the records' own completions: 4 were tried")
    expect(own_answers(x, "never"), False, "of text 1 of the step")
    assert empty_completions(x, "share_right") is None


def test_verifiers_read_the_records_completions_as_those_of_the_model_cut_before_a_stop_sequence(tmp_path):
    run = unexamined(completing(tmp_path, stop_sequences=("</SOLUTION>", "<end_working_out>"), response_prefix="="))
    stop = Stop(run.data.tokenizer, run.config.stop_sequences, "=")
    for record, example in zip(run.data.records["train"], right_examples(run)):
        own = example.texts["own"]
        assert own == stop.text(run.data.tokenizer.encode(record["completion"])) and own.startswith("=<start_working")
        assert "SOLUTION" not in own and own[1:] in record["completion"]
