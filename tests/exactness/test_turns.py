"""Completions of several turns: exact to the token, equal starts in a group, answers that nothing trains on."""

import random
import re
from types import SimpleNamespace

import pytest
import torch

from core.distributions import sampling_logp
from core.generation import Stop
from core.models import load_tokenizer
from core.prompts import PromptFormat
from grpo import environments
from grpo.environments import Episodes, environment
from grpo.rewards import Rewards
from grpo.sampling_settings import SamplingSettings
from tests.families import model_folder
from tests.tiny import (
    CAUSAL, causal_policy, clear_gradient, flat_gradient, prompt_config, prompt_consumer, same, step_gradient)
from tests.trainers import prompt_trainer, run, training_records

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SETTINGS = {"environment": "Echo", "max_turns": 4, "max_new_tokens": 24, "group_size": 4, "batch_size": 4, "top_p": 1.0,
            "reward_functions": ("environment",), "stop_sequences": tuple(LETTERS)}
MADE = []  # the environments that were made


@environment
class Echo:
    """Answers with the number of characters and a random number, and gives a tenth for each character."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.heard, self.answers, self.rewards = [], [], []
        MADE.append(self)

    def reset(self, record):
        self.record = record
        self.opening = self.random.random()

    def step(self, text):
        self.heard.append(text)
        answer = None if len(text) == 3 else f"<{len(text)}:{self.random.randint(0, 9)}>"
        self.answers.append(answer)
        self.rewards.append(len(text) / 10)
        return answer, self.rewards[-1]


@environment
class Speaks(Echo):
    """Answers with one list of messages, which it changes at every turn."""

    def step(self, text):
        answer, reward = super().step(text)
        self.said = [{"role": "user", "content": ""}] if len(self.heard) == 1 else self.said
        self.said[0]["content"] = answer or ""
        self.answers[-1] = answer and [{"role": "user", "content": answer}]
        return answer and self.said, reward


@environment
class Halves(Echo):
    """Answers with half a surrogate pair, as the JSON of a web tool can hold it."""

    def step(self, text):
        return "a \ud800 b", 0.0


@pytest.fixture(autouse=True)
def without_memory(monkeypatch):
    MADE.clear()
    monkeypatch.setattr(environments, "WARNED", {})


def episodes(prompts, **settings):
    """(config, policy, problems, rollouts) of a tiny policy."""
    c = prompt_config(**SETTINGS | settings)
    policy = causal_policy(1, scale=3.0)
    problems = prompt_consumer(prompts, c).problems("train", 0)
    return c, policy, problems, policy.sample(problems, 0, SamplingSettings.of(c))


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
    several = 0
    for n, one in enumerate(MADE):
        parts = pieces(rollouts, n)
        wrote = [ids for chosen, ids in parts if chosen]
        answers = [ids for chosen, ids in parts if not chosen]
        several += len(answers) > 1
        assert answers == [CAUSAL.encode(x) for x in one.answers[: len(answers)]] and len(wrote) <= c.max_turns
        for text, ids in zip(one.heard, wrote, strict=False):
            assert CAUSAL.decode(ids).rstrip(LETTERS) == text.rstrip(LETTERS)
        if not rollouts.truncated[n]:
            assert (one.answers[-1] is None or len(one.answers) == c.max_turns) and len(one.heard) == len(wrote)
        reward = rollouts.texts.columns["environment_reward"][n]
        assert reward == pytest.approx(sum(map(len, one.heard)) / 10)
    assert several > 3 and not rollouts.truncated.all()


@pytest.mark.parametrize("name", ["Echo", "Speaks"])
def test_the_turns_are_what_the_environment_heard_and_returned(prompts, name):
    """Of a turn that no token is left for the end of, the text alone."""
    c, _, _, rollouts = episodes(prompts, environment=name, max_new_tokens=14, stop_sequences=tuple(LETTERS[::2]))
    cut = 0
    for n, one in enumerate(MADE):
        turns = rollouts.texts.columns["environment_turns"][n]
        ended = [list(turn) for turn in zip(one.heard, one.answers, one.rewards, strict=True)]
        assert turns[: len(ended)] == ended
        last = CAUSAL.decode(pieces(rollouts, n)[-1][1])
        is_cut = rollouts.truncated[n] and last[-1] not in LETTERS[::2]
        assert turns[len(ended) :] == ([[last, None, None]] if is_cut else [])
        cut += is_cut
        if not rollouts.truncated[n]:
            assert ended[-1][1] is None or len(ended) == c.max_turns
    assert 0 < cut < len(MADE) - 3


def test_turns_without_a_verdict_are_those_of_environments_that_failed(prompts, monkeypatch):
    monkeypatch.setattr(Echo, "step", lambda self, text: self.nothing)
    _, _, _, rollouts = episodes(prompts)
    assert MADE and all(one.heard == [] for one in MADE)
    for n, ((text, *verdict),) in enumerate(rollouts.texts.columns["environment_turns"]):
        (chosen, ids), = pieces(rollouts, n)
        assert verdict == [None, None] and text.rstrip(LETTERS) == CAUSAL.decode(ids).rstrip(LETTERS)


ROLES = re.compile("user|assistant|tool", re.IGNORECASE)


@pytest.mark.parametrize("template", ["model", "chat"])
@pytest.mark.parametrize("answer", [
    "the brown fox", [{"role": "tool", "content": "the brown"}, {"role": "user", "content": "fox \ud800"}]],
    ids=["text", "messages"])
def test_the_names_of_roles_are_in_the_tokens_but_not_in_the_text(tmp_path, template, answer):
    pytest.importorskip("transformers")
    tokenizer = load_tokenizer(model_folder(str(tmp_path / "qwen3"), "qwen3"))

    @environment
    class Says(Echo):
        def step(self, text):
            return answer, 0.0

    c = prompt_config(**SETTINGS | {"template": template, "environment": "Says", "stop_sequences": ("</call>",),
                                    "group_size": 2, "max_new_tokens": 200})
    begun = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "So "}]
    problems = {"record": [{"prompt": begun}], "number": [0]}
    given = Episodes(problems, 0, c, Stop(tokenizer, c.stop_sequences))
    end, = tokenizer.encode("<|im_end|>")
    ids = tokenizer.encode("<call>the quick</call>")
    assert not given.answer_turn(0, ids)
    ids += given.given[0][given.given[0] >= 0].tolist() + [*tokenizer.encode("over the lazy dog"), end]
    assert not given.answer_turn(0, ids)
    alone = tokenizer.encode("seven wise owls")
    texts = SimpleNamespace(completions=["", ""], completion_ids=[ids, alone], columns={})
    given.add_to(texts)
    assert ROLES.search(tokenizer.decode(ids)) and not ROLES.search("".join(texts.completions))
    said = answer if isinstance(answer, str) else "the brown\n\nfox ?"
    assert texts.completions == [f"So <call>the quick</call>\n{said}\nover the lazy dog", "So seven wise owls"]
    assert texts.columns["environment_turns"] == [
        [["So <call>the quick", answer, 0.0], ["over the lazy dog", answer, 0.0]],
        [["So seven wise owls", None, None]]]


def test_each_token_has_the_probability_of_the_whole_text_before_it(prompts):
    """The first ratio is 1, and the gradient is that of each turn scored by itself behind the whole text."""
    c, policy, problems, rollouts = episodes(prompts, temperature=0.7, top_k=20)
    logp = policy.score(rollouts, c.temperature).logp
    torch.testing.assert_close(logp, rollouts.old_logp, rtol=0, atol=1e-5)
    weight = torch.rand(rollouts.target.shape) * rollouts.mask
    clear_gradient(policy)
    (logp * weight).sum().backward()
    shared = flat_gradient(policy)
    clear_gradient(policy)
    for n in range(len(logp)):
        p, place = n // c.group_size, 0
        text = problems["input"][p, problems["padding"][p] :].tolist()
        for chosen, part in pieces(rollouts, n):
            columns = slice(place, place + len(part))
            if chosen:
                logits = policy.project(policy.model.states(torch.tensor([text + part])))[0, len(text) - 1 : -1]
                alone = sampling_logp(logits, c.temperature)                         # (t, V)
                alone = alone.masked_fill(alone < alone.topk(20)[0][:, -1:], -torch.inf).log_softmax(-1)
                alone = alone[range(len(part)), part]
                torch.testing.assert_close(alone, logp[n, columns], rtol=0, atol=1e-5)
                (alone * weight[n, columns]).sum().backward()
            text, place = text + part, columns.stop
    assert (shared - flat_gradient(policy)).norm() < 1e-6 * shared.norm() > 0


def test_half_a_surrogate_pair_in_an_answer_is_read_as_a_question_mark(tmp_path):
    pytest.importorskip("transformers")
    tokenizer = load_tokenizer(model_folder(str(tmp_path / "llama"), "llama"))
    c = prompt_config(**SETTINGS | {"environment": "Halves"})
    given = Episodes({"record": [{"prompt": "a"}], "number": [0]}, 0, c, Stop(tokenizer, ()))
    end = tokenizer.stop_token_id
    assert not given.answer_turn(0, [end])
    answer = tokenizer.encode("a ? b")
    assert given.given[0, 1 : 1 + len(answer)].tolist() == answer


def test_turns_of_a_chat_model_make_the_text_of_its_template(tmp_path):
    pytest.importorskip("transformers")
    tokenizer = load_tokenizer(model_folder(str(tmp_path / "qwen3"), "qwen3"))
    end, *said = tokenizer.encode("<|im_end|>the quick")
    c = prompt_config(**SETTINGS | {"template": "model"})
    given = Episodes({"record": [], "number": []}, 0, c, Stop(tokenizer, ()))
    form = PromptFormat("model")
    messages = [("user", "1+1?"), ("assistant", "the quick"), ("user", "the brown fox")]
    messages = [{"role": role, "content": text} for role, text in messages]
    before, whole = form.encode("1+1?", tokenizer)[0], form.render(messages, tokenizer)
    for turn in (said, [*said, end]):  # the model wrote the end token itself, or not
        for answer in ("the brown fox", messages[2:]):
            assert before + tokenizer.backend.decode(turn) + given.framed_answer(answer, turn[-1]) == whole


def test_a_group_starts_in_one_state_and_other_problems_in_others(prompts):
    c, policy, problems, _ = episodes(prompts)
    first = [one.opening for one in MADE]
    assert [len(set(first[i : i + 4])) for i in (0, 4, 8, 12)] == [1] * 4 and len(set(first)) == 4
    for iteration in (0, 1):
        MADE.clear()
        policy.sample(problems, iteration, SamplingSettings.of(c))
        assert ([one.opening for one in MADE] == first) == (iteration == 0)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_completions_whose_environment_raises_are_skipped_and_the_others_are_as_before(prompts, monkeypatch, where):
    c, _, problems, before = episodes(prompts)
    method, fails_for = getattr(Echo, where), problems["record"][1]["prompt"]

    def fails(self, given):
        if (given if where == "reset" else self.record)["prompt"] == fails_for:
            raise KeyError("no answer")
        return method(self, given)

    monkeypatch.setattr(Echo, where, fails)
    rollouts = episodes(prompts)[3]
    skipped = Rewards(c).score(rollouts.texts, c.group_size)[0]["environment"].isnan()
    assert skipped[4:8].any() and skipped.sum() == rollouts.texts.metrics["environment/failed"][0] == skipped[4:8].sum()
    for n in (*range(4), *range(8, 16)):
        assert rollouts.texts.completion_ids[n] == before.texts.completion_ids[n]


# what answers have no part in

@environment
class Often(Echo):
    """Gives the same reward for all completions of most problems."""

    def step(self, text):
        answer, reward = super().step(text)
        return answer, 0.0 if self.opening < 0.6 else reward


@pytest.mark.parametrize("settings", [
    {}, {"kl_beta": 0.1}, {"kl_beta": 0.1, "kl_in_reward": True},
    {"teacher_checkpoint": "handed over", "distill_beta": 0.7}, {"objective": "gspo"}, {"objective": "dapo"},
    {"environment": "Often"}, {"mask_truncated": True}, {"environment": "Often", "zero_std": "resample"},
    {"max_staleness": 1}, {"max_staleness": 1, "ratio_to": "sampler", "objective": "dppo"}], ids=str)
def test_what_answers_were_taken_for_has_no_part_in_the_gradient(prompts, settings):
    """Other tokens and log-probabilities in their places, of what the policy reads nothing, change no bit."""
    c = prompt_config(**SETTINGS | {"kl_beta": 0.0} | settings)
    policy, data, spoiled = causal_policy(1, scale=3.0), prompt_consumer(prompts, c), []
    needs_reference = c.kl_beta or c.teacher_checkpoint is not None
    reference = causal_policy(2, scale=3.0).frozen() if needs_reference else None
    expected, sample = step_gradient(policy, reference, Rewards(c), data, c), policy.sample

    def sample_and_spoil(*arguments):
        rollouts = sample(*arguments)
        length = torch.tensor(list(map(len, rollouts.texts.completion_ids)))
        answers = (torch.arange(rollouts.mask.shape[1]) < length[:, None]) & (rollouts.mask == 0)
        rollouts.target[answers] += 1
        rollouts.old_logp[answers] = 5.0
        spoiled.append(int(answers.sum()))
        return rollouts
    policy.sample = sample_and_spoil
    assert torch.equal(step_gradient(policy, reference, Rewards(c), data, c), expected)
    assert expected.norm() > 0 and min(spoiled) > 0 and (len(spoiled) > 1) == (c.zero_std == "resample")


def test_padding_and_the_other_prompts_change_nothing(prompts):
    c, policy, problems, whole = episodes(prompts)
    for p in range(len(problems["number"])):
        one = {key: x[p : p + 1] for key, x in problems.items()}
        part = policy.sample(one, 0, SamplingSettings.of(c))
        rows = slice(p * c.group_size, (p + 1) * c.group_size)
        assert part.texts.completion_ids == whole.texts.completion_ids[rows]
        expected = whole.old_logp[rows, : part.old_logp.shape[1]]
        torch.testing.assert_close(part.old_logp, expected, rtol=0, atol=1e-4)


def test_a_resumed_run_goes_on_bit_for_bit_with_environments(prompts, tmp_path):
    settings = SETTINGS | {"max_new_tokens": 12, "lr_decay_iters": 4}

    def ran(name, steps, **more):
        return run(prompt_trainer(prompts, tmp_path / name, evaluates=False, **settings | {"max_iters": steps}), **more)

    whole, _ = ran("whole", 4), ran("cut", 2)
    assert same(whole.policy, ran("cut", 4, resume=True).policy)
    assert any("environment/turns" in record for record in training_records(tmp_path / "whole"))
