"""Completions of several turns in training, with every other part of a step."""

import random
import re

import pytest
import torch

from grpo.environments import environment
from grpo.rewards import Rewards
from tests.grpo.trainers import prompt_trainer
from tests.tiny import (
    causal_policy,
    grpo_step,
    prompt_config,
    prompt_consumer,
    read_records,
    step_gradient,
)

SETTINGS = {"environment": "Question", "max_turns": 4, "max_new_tokens": 24, "group_size": 4, "batch_size": 4,
            "reward_functions": ("environment",), "stop_sequences": tuple("abcdefghijklmnopqrstuvwxyz"), "kl_beta": 0.0}
TAUGHT = {"teacher_checkpoint": "a teacher", "distill_beta": 0.7}  # the policy is handed over


@environment
class Question:
    """Answers with a random number, three times out of four, and gives a tenth for each character."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def reset(self, record):
        pass

    def step(self, text):
        answer = f"<{self.random.randint(10, 99)}>" if self.random.random() < 0.75 else None
        return answer, len(text) / 10


@environment
class Often(Question):
    """Gives the same reward for all completions of most problems."""

    def __init__(self, seed):
        super().__init__(seed)
        self.equal = self.random.random() < 0.6

    def step(self, text):
        answer, reward = super().step(text)
        return answer, 0.0 if self.equal else reward


def made(prompts, **settings):
    """(config, policy, another policy as reference, data) of a step with environments."""
    c = prompt_config(**SETTINGS | settings)
    return c, causal_policy(1, scale=3.0), causal_policy(2, scale=3.0).frozen(), prompt_consumer(prompts, c)


def answers_of(rollouts):
    """(N, M) True on the tokens that the environment answered."""
    length = torch.tensor([len(ids) for ids in rollouts.texts.completion_ids])
    return (torch.arange(rollouts.mask.shape[1]) < length[:, None]) & (rollouts.mask == 0)


@pytest.mark.parametrize("settings", [
    {}, {"kl_beta": 0.1}, {"kl_beta": 0.1, "kl_in_reward": True}, TAUGHT, {"objective": "gspo"}, {"objective": "dapo"},
    {"environment": "Often"}, {"mask_truncated": True}, {"environment": "Often", "zero_std": "resample"},
    {"max_staleness": 1}, {"max_staleness": 1, "ratio_to": "sampler", "objective": "dppo"}], ids=str)
def test_what_answers_were_taken_for_has_no_part_in_the_gradient(prompts, settings):
    """Other tokens and log-probabilities in their places, of what the policy reads nothing, change no bit."""
    c, policy, reference, data = made(prompts, **settings)
    if not c.kl_beta and c.teacher_checkpoint is None:
        reference = None
    expected, sample, spoiled = step_gradient(policy, reference, Rewards(c), data, c), policy.sample, []

    def sample_and_spoil(*arguments):
        rollouts = sample(*arguments)
        answers = answers_of(rollouts)
        rollouts.target[answers] += 1
        rollouts.old_logp[answers] = 5.0
        spoiled.append(int(answers.sum()))
        return rollouts
    policy.sample = sample_and_spoil
    assert torch.equal(step_gradient(policy, reference, Rewards(c), data, c), expected)
    assert expected.norm() > 0 and min(spoiled) > 0 and (len(spoiled) > 1) == (c.zero_std == "resample")


@pytest.mark.parametrize("settings", [{"kl_beta": 0.1}, TAUGHT], ids=str)
def test_the_kl_is_that_of_the_tokens_of_the_policy(prompts, settings):
    c, policy, reference, data = made(prompts, **settings)
    metrics = grpo_step(policy, reference, Rewards(c), data, c)
    policy, problems = causal_policy(1, scale=3.0), data.problems("train", 0)
    rollouts = policy.sample(problems, 0, c)
    total = 0.0
    for n, ids in enumerate(rollouts.texts.completion_ids):
        before = problems["record"][n // 4]["tokens"]
        with torch.no_grad():
            p, q = (x.model(torch.tensor([before + ids]))[0].log_softmax(-1) for x in (policy, reference))
        for t, token in enumerate(ids):
            own, other = (x[len(before) - 1 + t] for x in (p, q))
            if rollouts.mask[n, t] and c.teacher_checkpoint:
                total += float((own.exp() * (own - other)).sum())
            elif rollouts.mask[n, t]:
                x = other[token] - own[token]
                total += float(x.exp() - x - 1)
    assert metrics["mean_kl"] == pytest.approx(total / float(rollouts.mask.sum()), rel=1e-4) and total > 0.1


def test_samples_of_a_run_are_cut_where_the_environment_answered(prompts, tmp_path):
    prompt_trainer(prompts, tmp_path, **SETTINGS | {"max_iters": 1}).run()
    answers = 0
    for record in read_records(str(tmp_path / "samples.jsonl")):
        for about in record["group"]:
            answers += len(re.findall("^> <[0-9][0-9]>$", about["text"], re.MULTILINE))
    assert answers > 3 and "&gt; &lt;" in (tmp_path / "report.html").read_text()
