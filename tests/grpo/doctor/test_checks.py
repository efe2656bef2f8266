"""Each check of the doctor, and what breaks it."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from core.generation import Stop
from grpo.doctor.checks import (
    empty_completions,
    ends_of_completions,
    equal_starts,
    gradient,
    judge_on_true_texts,
    lost_characters,
    own_answers,
    right_completions,
    values_in_range,
    wrong_answers,
)
from grpo.environments import environment
from grpo.rewards import Scored
from tests.grpo.evaluation.patients import completing, examined, expect, filling, sums
from tests.tiny import causal_policy, prompt_config, prompt_consumer

pytestmark = pytest.mark.slow  # it is the number of them that takes the time


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return examined(completing(tmp_path_factory.mktemp("healthy")))


def test_a_healthy_step_is_called_fine(healthy):
    for check in (gradient, lost_characters, ends_of_completions):
        expect(check(healthy), True, "")
    for check in (values_in_range, own_answers, wrong_answers, empty_completions):
        expect(check(healthy, "math_number"), True, "math_number")


@pytest.mark.parametrize(("size", "sentence"), [
    (0.0, "The gradient is 0, so nothing is learned"), (float("nan"), "The gradient is nan")])
def test_a_gradient_that_teaches_nothing_is_found(healthy, size, sentence):
    expect(gradient(replace(healthy, gradient=dict.fromkeys(healthy.gradient, size))), False, sentence, "float32")


def test_what_is_wrong_with_the_models_is_found(tmp_path):
    run = completing(tmp_path)
    run.models.policy.model.blocks[2].requires_grad_(False)
    expect(gradient(examined(run)), False, "The gradient is 0 in layer 2.", "without freezing")


def test_prompts_that_the_tokenizer_cannot_write_are_found(tmp_path):
    run = completing(tmp_path, [record | {"prompt": record["prompt"] + "\u4eca\u65e5"} for record in sums()])
    expect(lost_characters(run), False, "of the characters in the prompts have no tokens", "whose tokenizer")


def test_an_end_that_cuts_right_completions_is_found(tmp_path):
    def of(**settings):
        return ends_of_completions(completing(tmp_path, **settings))

    expect(of(stop_sequences=("</SOLUTION>",)), True, "no stop sequence cuts them")
    expect(of(stop_sequences=("</SOLUTION>", "<SOLUTION>")), False, "'<SOLUTION>' is inside 100% of", "leave '<SOLU")
    short = of(max_new_tokens=16)
    expect(short, False, "are longer than max_new_tokens=16", "set max_new_tokens=")
    enough = int(short[2].split("=")[1].split(",")[0])
    assert of(max_new_tokens=enough)[0] is True


def test_a_reward_that_leaves_its_range_is_found(healthy):
    x = replace(healthy, scored=Scored(torch.zeros(1, 2), values={"math_number": torch.tensor([0.0, 5.0])}))
    expect(values_in_range(x, "math_number"), False, "gave 0 to 5, but declares -2.5 to 3.5", "@reward(-2.5, 5)")


def test_verifiers_are_tried_on_answers_in_every_form(tmp_path):
    x = completing(tmp_path, sums(completion=None), reward_functions=("math_answer", "exact_match", "math_format"))
    for name in ("math_answer", "exact_match"):
        expect(own_answers(x, name), True, "8 were tried")
    assert own_answers(x, "math_format") is empty_completions(x, "math_format") is None, "it reads no record"


@pytest.mark.parametrize(("changes", "settings"), [
    ({"answer": "The answer is 8."}, {}), ({"completion": None, "answer": "so it is 8"}, {}),
    ({"completion": None}, {"reward_functions": ("exact_match",), "response_prefix": "="})])
def test_a_verifier_that_rejects_the_records_answers_is_found(tmp_path, changes, settings):
    x = completing(tmp_path, sums(**changes), **settings)
    expect(own_answers(x, *x.rewards.names), False, "records.jsonl, line 2 right: it gives ", "correct the records")


HEDGED = ["both 'X or Y' and 'Y or X'"]
READ = ["'not X'", "'X X'"]


@pytest.mark.parametrize(("name", "fine", "accepted"), [
    ("exact_match", True, []), ("math_answer", True, []), ("math_number", True, READ), ("last_number", True, READ),
    ("whole", True, []), ("contains", False, HEDGED + READ), ("inside", False, [*HEDGED, "the prompt", *READ]),
    ("longest", False, ["Y", *HEDGED, "the prompt", *READ])])
def test_wrong_answers_that_a_verifier_accepts_are_named(tmp_path, name, fine, accepted):
    (tmp_path / "mine.py").write_text(MINE)
    records = sums() if name == "whole" else sums(completion=None)
    if name == "inside":  # its prompts have the answer among others
        records = [record | {"prompt": f"{record['prompt']} 1, 2, {record['answer']}?"} for record in records]
    x = completing(tmp_path, records, reward_file=str(tmp_path / "mine.py"), reward_functions=(name,))
    expect(wrong_answers(x, name), fine, f"{name} accepts {', '.join(accepted) or 'no wrong answer'}: ", "as a whole")


def test_without_an_accepted_answer_no_wrong_ones_are_tried(tmp_path):
    asked = ("math_number", "math_format")
    records = [record | {"answer": f"so it is {record['answer']}"} for record in sums(completion=None)]
    x = completing(tmp_path, records, reward_functions=asked)
    expect(wrong_answers(x, "math_number"), True, "0 were")
    assert wrong_answers(x, "math_format") is None, "it reads no record"
    x = completing(tmp_path, sums(answer=None, pattern="8"), reward_functions=("regex",))
    assert wrong_answers(x, "regex") is None


MINE = """import re
from grpo.rewards import reward

@reward(0, 1)
def fails(prompts, completions, answer):
    return [float(int(text) == int(a)) for text, a in zip(completions, answer)]

@reward(0, 1)
def never_empty(prompts, completions, answer):
    return [float(not text or a in text) for text, a in zip(completions, answer)]

@reward(0, 1)
def longest(prompts, completions, answer):
    return [float(len(text) >= len(a)) for text, a in zip(completions, answer)]

@reward(0, 2)
def whole(prompts, completions, answer):
    return [("working" in text) + float(f"N>{a}<" in text) for text, a in zip(completions, answer)]

def inside(completions, answer, **kwargs):
    return [a in text for text, a in zip(completions, answer)]

def last_number(completions, answer, **kwargs):
    return [re.findall("[0-9]+", text)[-1:] == [a] for text, a in zip(completions, answer)]

def of_trl(completions, answer, **kwargs):
    return [float(text[len(text) - 1] > "" and a in text) for text, a in zip(completions, answer)]
"""


@pytest.mark.parametrize(("name", "check", "sentence", "remedy"), [
    ("fails", own_answers, "fails on the right answer of", "correct the function"),
    ("never_empty", empty_completions, "gives its highest value, 1, for an empty", "learn to write"),
    ("of_trl", empty_completions, "fails on an empty completion", "return 0 or None")])
def test_functions_of_the_user_are_tried_as_trl_and_this_project_call_them(tmp_path, name, check, sentence, remedy):
    (tmp_path / "mine.py").write_text(MINE)
    run = completing(tmp_path, reward_file=str(tmp_path / "mine.py"), reward_functions=("math_number", "of_trl"))
    expect(check(run, name), False, sentence, remedy)


def test_verifiers_read_the_records_completions_as_those_of_the_model_cut_before_a_stop_sequence(tmp_path):
    run = completing(tmp_path, stop_sequences=("</SOLUTION>", "<end_working_out>"), response_prefix="=")
    stop = Stop(run.data.tokenizer, run.config.stop_sequences, "=")
    for record in run.data.records["train"]:
        right, = right_completions(run, "math_number", record)
        assert right == stop.text(run.data.tokenizer.encode(record["completion"]))
        assert right.startswith("=<start_working") and "SOLUTION" not in right


def test_a_judge_that_prefers_filled_text_is_found(tmp_path, monkeypatch):
    x = examined(filling(tmp_path))
    expect(judge_on_true_texts(x), True, "for the true texts and")
    assert lost_characters(x) is ends_of_completions(x) is None, "it has no prompts"
    scores = x.models.judge.scores
    monkeypatch.setattr(x.models.judge, "scores", lambda texts: 1 - scores(texts))
    expect(judge_on_true_texts(x), False, "for the true texts and", "was trained on texts of this kind")


@environment
class Fair:
    """Answers with a random number, three times out of four."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self, record):
        pass

    def step(self, text):
        answer = f"<{self.draw()}>" if self.random.random() < 0.75 else None
        return answer, self.reward(text)

    def draw(self):
        return self.random.randint(10, 99)

    def reward(self, text):
        return len(text)


@environment
class Luck(Fair):
    def reward(self, text):
        return random.random()


@environment
class Shared(Fair):
    count = itertools.count(10)

    def draw(self):
        return next(self.count)


@pytest.mark.parametrize(("name", "other", "fine"), [
    ("Fair", 0, True), ("Shared", 0, False), ("Luck", 0, False), ("Fair", 1, True)])
def test_environments_that_answer_the_same_texts_differently_are_found(prompts, name, other, fine):
    c = prompt_config(environment=name, max_turns=3, max_new_tokens=60, group_size=4, batch_size=4, top_p=1.0,
                      reward_functions=("environment",), stop_sequences=tuple("abcdefghijklmnopqrstuvwxyz"))
    policy = causal_policy(1, scale=3.0, block_size=160)

    def sample(*arguments):
        rollouts = policy.sample(*arguments)
        rollouts.target[::2, 0] += other  # a policy that writes something else is not taken for its environment
        return rollouts

    x = SimpleNamespace(config=c, problems=prompt_consumer(prompts, c).problems("train", 0),
                        models=SimpleNamespace(policy=SimpleNamespace(sample=sample)))
    expect(equal_starts(x), fine, "in 4 of 4 problems" if fine else "two environments heard the same texts")
