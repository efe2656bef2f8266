"""The groups of training in samples.jsonl, and the seconds of rewards: those of the step, not doubled by a resume."""

import statistics
from types import SimpleNamespace

import pytest

import grpo.rewards
from grpo.environments import environment
from grpo.rewards import reward
from tests.tiny import read_records
from tests.trainers import prompt_trainer, records, run, trainer, training_records

pytestmark = pytest.mark.usefixtures("without_pictures")
OF_PROMPTS = {"reward_functions": ("early", "letter"), "reward_weights": (2.0, -0.5), "max_iters": 7}
HEARD = []  # (text, answer, reward) of all calls of the environment


@pytest.fixture(autouse=True)
def two_rewards():
    @reward(0, 1)
    def early(completions):
        return [float(text[:1] < "P") for text in completions]

    @reward
    def letter(completions):
        """Skips some completions."""
        return [None if ord(text[:1] or "a") % 8 == 1 else ord(text[:1] or "a") / 8 for text in completions]


def groups_of(out_dir):
    """{step: the training groups in samples.jsonl}"""
    found = {}
    for record in read_records(out_dir / "samples.jsonl"):
        if record.get("split") == "train":
            found.setdefault(record["step"], []).append(record["group"])
    return found


def mean(values):
    return statistics.fmean(x for x in values if x is not None)


@pytest.mark.parametrize(("settings", "steps"), [
    ({}, [1, 4, 7]), ({"ppo_epochs": 2}, [1, 3, 7]), ({"minibatches": 4, "max_iters": 8}, [1, 5]),
    ({"zero_std": "drop", "sample_interval": 2}, [1, 3, 5, 7]), ({"max_staleness": 1}, [1, 4, 7])], ids=str)
def test_all_groups_of_a_step_have_the_means_that_it_logs(prompts, tmp_path, settings, steps):
    run(prompt_trainer(prompts, tmp_path, **OF_PROMPTS | {"train_samples": 99} | settings))
    logged = {record["step"]: record for record in training_records(tmp_path)}
    found = groups_of(tmp_path)
    assert list(found) == steps
    for step, groups in found.items():
        completions = sum(groups, [])
        assert [len(group) for group in groups] == [4] * 4
        assert mean(about["reward"] for about in completions) == pytest.approx(logged[step]["mean_reward"], abs=1e-4)
        for name in ("early", "letter"):
            values = [about["rewards"][name] for about in completions]
            assert mean(values) == pytest.approx(logged[step][f"reward/{name}"], abs=1e-4)
            assert values.count(None) == logged[step][f"skipped/{name}"]
        for about in completions:
            early = about["rewards"]["early"]
            assert early == (about["text"][:1] < "P") == about["right"]
    assert logged[1]["skipped/letter"] > 0


@pytest.mark.parametrize("kind", [prompt_trainer, trainer])
def test_the_first_groups_are_recorded_if_the_setting_asks_for_them(kind, prompts, dataset, tmp_path):
    of = prompts if kind is prompt_trainer else dataset
    for count in (0, 1, 3):
        run(kind(of, tmp_path / str(count), evaluates=True, max_iters=4, train_samples=count))
    none, first, three = (groups_of(tmp_path / str(count)) for count in (0, 1, 3))
    assert none == {} and list(first) == list(three) == [1, 4] and [len(groups) for groups in three.values()] == [3, 3]
    assert first == {step: groups[:1] for step, groups in three.items()}
    logs = [training_records(tmp_path / str(count)) for count in (0, 3)]
    without, with_groups = ([[x["loss"], x["mean_reward"]] for x in log] for log in logs)
    assert without == with_groups, "and nothing else changes"


class Cut(Exception):
    pass


def test_a_run_that_is_cut_and_resumed_has_the_samples_of_one_that_is_not(prompts, tmp_path):
    def made(name):
        return prompt_trainer(prompts, tmp_path / name, **OF_PROMPTS | {"train_samples": 2})

    run(made("whole"))
    cut = made("cut")
    log_step = cut.log_step

    def stopped(metrics):
        log_step(metrics)
        if cut.step == 5:  # the last state is that of step 3, and the groups of step 4 are written
            raise Cut
    cut.log_step = stopped
    with pytest.raises(Cut):
        run(cut)
    assert list(groups_of(tmp_path / "cut")) == [1, 4]
    run(made("cut"), resume=True)
    assert read_records(tmp_path / "cut/samples.jsonl") == read_records(tmp_path / "whole/samples.jsonl")


@environment
class Listens:
    """Answers a digit with its neighbour, and says what it hears."""

    def reset(self, record):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        answer = None if self.turns == 3 else f"<{len(text)}>"
        HEARD.append([text, answer, self.turns / 4])
        return HEARD[-1][1:]


def test_the_turns_in_the_file_are_those_that_the_environment_heard(prompts, tmp_path):
    HEARD.clear()
    run(prompt_trainer(prompts, tmp_path, environment="Listens", reward_functions=("environment",), max_iters=2,
                       max_new_tokens=20, stop_sequences=tuple("aeiou0123456789"), train_samples=9))
    splits = {"val": [], "train": []}
    for record in read_records(tmp_path / "samples.jsonl"):
        splits[record.get("split", "val")] += record["group"]
    for completions in splits.values():
        turns = [turn for about in completions for turn in about["turns"]]
        ended = [turn for turn in turns if turn[2] is not None]
        assert len(ended) > 9 and all(turn in HEARD for turn in ended)
        assert all(answer is None for text, answer, of_turn in turns if of_turn is None)
        for about in completions:
            total = sum(of_turn or 0.0 for text, answer, of_turn in about["turns"])
            assert about["reward"] == about["rewards"]["environment"] == total


def test_the_seconds_of_a_reward_are_those_of_its_calls_in_training(prompts, tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(grpo.rewards, "time", clock)

    @reward
    def long(completions):
        clock.now += 5.0
        return [0.0 for _ in completions]

    @reward
    def brief(completions):
        clock.now += 0.25
        return [1.0 for _ in completions]

    run(prompt_trainer(prompts, tmp_path, reward_functions=("long", "brief"), max_iters=3))
    for record in training_records(tmp_path):
        assert (record["time/reward/long"], record["time/reward/brief"]) == (5.0, 0.25)
    assert not any("eval/time" in key for record in records(tmp_path) for key in record)
