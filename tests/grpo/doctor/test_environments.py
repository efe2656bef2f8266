"""What the doctor says of an environment, and environments that break it."""

import itertools
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from core import prompts as templates
from core.models import load_model, load_tokenizer
from core.prompts import PromptConsumer, PromptFormat
from grpo.doctor.environments import answers_in_loss, endless_turns, equal_starts, glue
from grpo.environments import environment
from grpo.policies.causal import CausalPolicy
from tests.families import model_folder
from tests.grpo.evaluation.patients import expect
from tests.tiny import causal_policy, jsonl, prompt_config, prompt_consumer

SETTINGS = {"environment": "Fair", "max_turns": 3, "max_new_tokens": 60, "group_size": 4, "batch_size": 4, "top_p": 1.0,
            "reward_functions": ("environment",), "stop_sequences": tuple("abcdefghijklmnopqrstuvwxyz")}
ANSWERS = []


@environment
class Fair:
    """Answers with a random number, three times out of four."""

    metrics = ("characters",)

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.characters = (0, 1)

    def reset(self, record):
        pass

    def step(self, text):
        self.characters = (len(text), 1)
        answer = f"<{self.draw()}>" if self.random.random() < 0.75 else None
        ANSWERS.append(answer)
        return answer, self.reward(text)

    def draw(self):
        return self.random.randint(10, 99)

    def reward(self, text):
        return len(text)


@environment
class Unseeded(Fair):
    def draw(self):
        return random.randint(10, 99)


@environment
class Luck(Fair):
    def reward(self, text):
        return random.random()


@environment
class Shared(Fair):
    count = itertools.count(10)

    def draw(self):
        return next(self.count)


@environment
class Clock(Fair):
    metrics = ("seconds",)

    @property
    def seconds(self):
        return time.perf_counter(), 1


@environment
class Endless(Fair):
    def step(self, text):
        return "<>", 0.0


def step(prompts, **settings):
    """The fields of an Examination that these checks read, of a tiny policy."""
    c = prompt_config(**SETTINGS | settings)
    data = prompt_consumer(prompts, c)
    policy, problems = causal_policy(1, scale=3.0, block_size=160), data.problems("train", 0)
    return SimpleNamespace(config=c, data=data, problems=problems, models=SimpleNamespace(policy=policy),
                           rollouts=policy.sample(problems, 0, c))


@pytest.mark.parametrize(("name", "verdict", "sentence", "remedy"), [
    ("Fair", True, "answer the same, in 4 of 4 problems", ""),
    ("Unseeded", False, "two environments heard the same texts and gave other answers", "draw what is random from random.Random(seed)"),
    ("Shared", False, "two environments heard the same texts and gave other answers", "change nothing outside of its own"),
    ("Luck", False, "In 4 of 4 problems", "random.Random(seed)"),
    ("Clock", None, "environment/seconds changed when the same episodes were played again", "nothing to do if it measures time")])
def test_environments_that_answer_the_same_texts_differently_are_found(prompts, name, verdict, sentence, remedy):
    expect(equal_starts(step(prompts, environment=name)), verdict, sentence, remedy)


def test_a_policy_that_writes_something_else_is_not_taken_for_its_environment(prompts):
    x = step(prompts)
    sample = x.models.policy.sample

    def other(*arguments):
        rollouts = sample(*arguments)
        rollouts.target[::2, 0] += 1
        return rollouts
    x.models.policy.sample = other
    assert equal_starts(x)[0] is True


def test_tokens_of_answers_in_the_loss_are_found(prompts):
    ANSWERS.clear()
    x = step(prompts, max_turns=2)
    assert not x.rollouts.truncated.any()
    given = len(ANSWERS) - sum(answer is None for answer in ANSWERS)
    second = x.rollouts.texts.metrics["environment/turns"][0] - len(x.rollouts.target)
    expect(answers_in_loss(x), True, f"The {4 * int(second)} tokens of answers have mask 0")
    assert 0 < second < given
    ones = torch.ones_like(x.rollouts.mask)
    for spoiled in ({"train_mask": ones}, {"mask": ones, "train_mask": ones}):
        found = answers_in_loss(SimpleNamespace(rollouts=replace(x.rollouts, **spoiled)))
        expect(found, False, "that the environment answered are in the loss", "must set mask and train_mask to 0")


def test_a_template_that_renders_turns_differently_is_found(prompts, monkeypatch):
    expect(glue(step(prompts)), True, "template='plain': an answer is appended as it is")
    x = step(prompts, template="chat", max_new_tokens=90)
    several = sum("User: <" in text for text in x.rollouts.texts.completions)
    expect(glue(x), True, f"In {several} of {several} episodes the policy read what the template renders")
    assert several > 4
    monkeypatch.setitem(templates.TEMPLATES, "chat", without_last_letters)
    expect(glue(x), None, f"In 0 of {several} episodes", "only leaves out space, thoughts or")


def without_last_letters(messages):
    return templates.chat([message | {"content": message["content"][:-1]} if message["role"] == "assistant" else message
                           for message in messages])


@pytest.mark.parametrize("front", ["\n\nHuman: ", "\n\n", ""])
def test_other_text_around_an_answer_is_found(prompts, monkeypatch, front):
    behind = lambda self, messages, tokenizer: front + messages[0]["content"] + "\n\nAssistant: "
    monkeypatch.setattr(PromptFormat, "behind", behind)
    expect(glue(step(prompts, template="chat", max_new_tokens=90)), None, "In 0 of ", "template='plain'")


@pytest.mark.slow
def test_the_template_of_a_chat_model_renders_what_the_policy_read_unless_a_turn_had_another_end(tmp_path):
    pytest.importorskip("transformers")
    path = model_folder(str(tmp_path / "qwen3"), "qwen3")
    tokenizer = load_tokenizer(path)
    policy = CausalPolicy(load_model(path)[0], tokenizer)
    c = prompt_config(**SETTINGS | {"template": "model", "stop_sequences": ("e",), "max_new_tokens": 90})
    records = [{"prompt": f"{i}+1?", "split": "train" if i else "val"} for i in range(5)]
    data = PromptConsumer(jsonl(tmp_path / "p.jsonl", *records), 4, format=PromptFormat("model"), tokenizer=tokenizer)
    rollouts = policy.sample(data.problems("train", 0), 0, c)
    texts = [tokenizer.backend.decode(ids) for ids in rollouts.texts.completion_ids]
    several = sum("<|im_start|>user" in text for text in texts)
    other_end = sum("<|endoftext|><|im_end|>" in text for text in texts)
    x = SimpleNamespace(config=c, data=data, rollouts=rollouts, models=SimpleNamespace(policy=policy))
    expect(glue(x), None, f"In {several - other_end} of {several} episodes")
    assert 0 < other_end < several - 1


@pytest.mark.parametrize(("settings", "verdict", "sentence", "remedy"), [
    ({}, True, "0% of the episodes are cut at max_new_tokens=60", ""),
    ({"environment": "Endless"}, None, "100% come to max_turns=3 turns", "return the answer None"),
    ({"environment": "Endless", "max_turns": 30}, False, "100% of the episodes are cut at max_new_tokens=60, 0% come", "raise max_new_tokens")])
def test_turns_that_never_end_are_found(prompts, settings, verdict, sentence, remedy):
    expect(endless_turns(step(prompts, **settings)), verdict, sentence, remedy)
