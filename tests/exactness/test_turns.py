"""Completions of several turns: exact to the token, equal starts in a group, answers that nothing trains on."""

import math
import random

import pytest
import torch

from core.distributions import sampling_logp
from core.models import load_model, load_tokenizer
from core.prompts import PromptConsumer, PromptFormat
from grpo import environments
from grpo.environments import environment
from grpo.policies.causal import CausalPolicy
from grpo.rewards import Rewards
from tests.families import model_folder
from tests.trainers import prompt_trainer
from tests.tiny import (
    CAUSAL, causal_policy, clear_gradient, flat_gradient, jsonl, prompt_config, prompt_consumer, same, step_gradient)

SETTINGS = {"environment": "Echo", "max_turns": 4, "max_new_tokens": 24, "group_size": 4, "batch_size": 4, "top_p": 1.0,
            "reward_functions": ("environment",), "stop_sequences": tuple("abcdefghijklmnopqrstuvwxyz")}
MADE = []  # the environments that were made


@environment
class Echo:
    """Answers with the number of characters and a random number, and gives a tenth for each character."""

    metrics = ("characters",)

    def __init__(self, seed):
        self.random, self.seed = random.Random(seed), seed
        self.heard, self.answers = [], []
        MADE.append(self)

    def reset(self, record):
        self.record = record
        self.opening = self.random.random()

    def step(self, text):
        self.heard.append(text)
        answer = None if len(text) == 3 else f"<{len(text)}:{self.random.randint(0, 9)}>"
        self.answers.append(answer)
        return answer, len(text) / 10

    def close(self):
        self.closed = True

    @property
    def characters(self):
        return sum(map(len, self.heard)), len(self.heard)


@pytest.fixture(autouse=True)
def without_memory(monkeypatch):
    MADE.clear()
    monkeypatch.setattr(environments, "WARNED", set())


def episodes(prompts, seed=1, **settings):
    """(config, policy, problems, rollouts) of a tiny policy."""
    c = prompt_config(**SETTINGS | settings)
    policy = causal_policy(seed, scale=3.0)
    problems = prompt_consumer(prompts, c).problems("train", 0)
    return c, policy, problems, policy.sample(problems, 0, c)


def pieces(rollouts, n):
    """[(whether the policy wrote them, [tokens])] of a completion, in order."""
    ids, found = rollouts.texts.completion_ids[n], []
    for token, chosen in zip(ids, rollouts.mask[n].bool().tolist(), strict=False):
        if not found or found[-1][0] != chosen:
            found.append((chosen, []))
        found[-1][1].append(token)
    return found


def test_the_tokens_are_those_that_were_sampled_and_those_of_the_answers(prompts):
    c, _, _, rollouts = episodes(prompts)
    several = turns = 0
    for n, one in enumerate(MADE):
        parts = pieces(rollouts, n)
        wrote = [ids for chosen, ids in parts if chosen]
        answers = [ids for chosen, ids in parts if not chosen]
        turns += len(wrote)
        several += len(answers) > 1
        assert answers == [CAUSAL.encode(x) for x in one.answers[: len(answers)]] and len(wrote) <= c.max_turns
        for text, ids in zip(one.heard, wrote, strict=False):
            said = CAUSAL.decode(ids)
            assert said == text or (said[:-1] == text and said[-1] in c.stop_sequences)
        if not rollouts.truncated[n]:
            assert (one.answers[-1] is None or len(one.answers) == c.max_turns) and len(one.heard) == len(wrote)
        reward = rollouts.texts.columns["environment_reward"][n]
        assert math.isclose(reward, sum(map(len, one.heard)) / 10, abs_tol=1e-9)
        assert one.closed
    assert several > 3 and not rollouts.truncated.all()
    sums = rollouts.texts.metrics
    assert sums["environment/turns"] == (turns, len(MADE)), "one that max_new_tokens cuts too"
    assert sums["environment/characters"][0] == sum(len(text) for one in MADE for text in one.heard)


@pytest.mark.parametrize("more", [{}, {"temperature": 0.7, "top_k": 20}], ids=str)
def test_each_token_has_the_probability_of_the_whole_text_before_it(prompts, more):
    c, policy, problems, rollouts = episodes(prompts, **more)
    scores = policy.score(rollouts, c.temperature)
    torch.testing.assert_close(scores.logp, rollouts.old_logp, rtol=0, atol=1e-5)
    assert not scores.logp[rollouts.mask == 0].any()
    clear_gradient(policy)
    weight = torch.rand(rollouts.target.shape) * rollouts.mask
    (scores.logp * weight).sum().backward()
    shared = flat_gradient(policy)
    clear_gradient(policy)
    for n, ids in enumerate(rollouts.texts.completion_ids):  # each turn is scored by itself
        p = n // c.group_size
        text = problems["input"][p, problems["padding"][p] :].tolist()
        place = 0
        for chosen, part in pieces(rollouts, n):
            if chosen:
                read = torch.tensor([text + part])
                logits = policy.project(policy.model.states(read))[0, len(text) - 1 : -1]
                logp = sampling_logp(logits, c.temperature)                          # (t, V)
                if "top_k" in more:
                    logp = logp.masked_fill(logp < logp.topk(20)[0][:, -1:], -torch.inf).log_softmax(-1)
                logp = logp[range(len(part)), part]
                torch.testing.assert_close(logp, scores.logp[n, place : place + len(part)], rtol=0, atol=1e-5)
                (logp * weight[n, place : place + len(part)]).sum().backward()
            text, place = text + part, place + len(part)
        assert place == len(ids)
    assert (shared - flat_gradient(policy)).norm() < 1e-6 * shared.norm() > 0


def test_turns_of_a_chat_model_make_the_text_of_its_template(tmp_path, prompts):
    pytest.importorskip("transformers")
    path = model_folder(str(tmp_path / "qwen3"), "qwen3")
    tokenizer = load_tokenizer(path)
    policy = CausalPolicy(load_model(path)[0], tokenizer)
    end = tokenizer.backend.convert_tokens_to_ids("<|im_end|>")
    assert end in tokenizer.stop_token_ids
    c = prompt_config(**SETTINGS | {"template": "model", "stop_sequences": ("e",), "max_new_tokens": 70})
    form = PromptFormat("model")
    records = [{"prompt": f"{i}+1?", "split": "train" if i else "val"} for i in range(5)]
    data = PromptConsumer(jsonl(tmp_path / "p.jsonl", *records), 4, format=form, tokenizer=tokenizer)
    problems = data.problems("train", 0)
    first = policy.sample(problems, 0, c)
    common = first.target[first.mask > 0].bincount().argmax()
    with torch.no_grad():  # end tokens that are as likely as the commonest
        policy.model.net.lm_head.weight[end] = policy.model.net.lm_head.weight[common]
    MADE.clear()
    rollouts = policy.sample(problems, 0, c)
    torch.testing.assert_close(policy.score(rollouts, c.temperature).logp, rollouts.old_logp, rtol=0, atol=1e-4)
    decode, compared = tokenizer.backend.decode, {True: 0, False: 0}
    for n in range(len(rollouts.target)):
        parts = pieces(rollouts, n)
        if len(parts) < 3:
            continue
        said, ended = parts[0][1], parts[0][1][-1] == end
        messages = [{"role": "user", "content": problems["record"][n // c.group_size]["prompt"]},
                    {"role": "assistant", "content": decode(said[:-1] if ended else said)},
                    {"role": "user", "content": MADE[n].answers[0]}]
        begin = form.encode(messages[0]["content"], tokenizer)[0]
        assert begin + decode(said + parts[1][1]) == form.render(messages, tokenizer)
        compared[ended] += 1
    assert all(compared.values())


def test_a_group_starts_in_one_state_and_other_problems_in_others(prompts):
    c, policy, problems, _ = episodes(prompts)
    first = [one.opening for one in MADE]
    assert [len(set(first[i : i + 4])) for i in (0, 4, 8, 12)] == [1] * 4 and len(set(first)) == 4
    for iteration in (0, 1):
        MADE.clear()
        policy.sample(problems, iteration, c)
        assert ([one.opening for one in MADE] == first) == (iteration == 0)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_an_environment_that_raises_is_counted_and_its_completions_are_skipped(prompts, monkeypatch, capfd, where):
    """In problems with an even first number; the others are as before."""
    _, _, problems, before = episodes(prompts)
    wanted = [int(r["prompt"].split("+")[0]) % 2 == 0 for r in problems["record"] for _ in range(4)]
    method = getattr(Echo, where)

    def fails(self, given):
        record = given if where == "reset" else self.record
        if int(record["prompt"].split("+")[0]) % 2 == 0:
            raise KeyError("no answer")
        return method(self, given)

    monkeypatch.setattr(Echo, where, fails)
    c, _, _, rollouts = episodes(prompts)
    skipped = Rewards(c).score(rollouts.texts, c.group_size)[0]["environment"].isnan().tolist()
    assert any(skipped) and not any(s and not w for s, w in zip(skipped, wanted, strict=True))
    assert rollouts.texts.metrics["environment/failed"][0] >= sum(skipped)
    assert capfd.readouterr().err.count("test_turns.py, line ") == 1
    for n, spoiled in enumerate(wanted):
        assert spoiled or rollouts.texts.completion_ids[n] == before.texts.completion_ids[n]


def test_padding_and_the_other_prompts_change_nothing(prompts):
    c, policy, problems, whole = episodes(prompts)
    for p in range(len(problems["number"])):
        part = policy.sample({key: x[p : p + 1] for key, x in problems.items()}, 0, c)
        rows, M = slice(p * c.group_size, (p + 1) * c.group_size), part.old_logp.shape[1]
        assert part.texts.completion_ids == whole.texts.completion_ids[rows]
        torch.testing.assert_close(part.old_logp, whole.old_logp[rows, :M], rtol=0, atol=1e-4)


def test_a_resumed_run_goes_on_bit_for_bit_with_environments(prompts, tmp_path):
    settings = SETTINGS | {"max_new_tokens": 12, "max_iters": 4, "save_interval": 2, "learning_rate": 1e-3}
    whole = prompt_trainer(prompts, tmp_path / "whole", **settings)
    whole.run()
    prompt_trainer(prompts, tmp_path / "parts", **settings | {"max_iters": 2}).run()
    second = prompt_trainer(prompts, tmp_path / "parts", **settings)
    second.resume()
    second.run()
    assert same(whole.policy, second.policy)


# what answers have no part in

TAUGHT = {"teacher_checkpoint": "a teacher", "distill_beta": 0.7}  # the policy is handed over


@environment
class Often(Echo):
    """Gives the same reward for all completions of most problems."""

    def step(self, text):
        answer, reward = super().step(text)
        return answer, 0.0 if self.opening < 0.6 else reward


def made(prompts, **settings):
    """(config, policy, another policy as reference, data) of a step with environments."""
    c = prompt_config(**SETTINGS | {"kl_beta": 0.0} | settings)
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
