"""A step with a number that is not finite, in sampling, rewards, loss or gradient, is skipped, counted and named."""

import random
import re
from types import SimpleNamespace

import pytest
import torch

from core.errors import Mistake
from core.models import save_model
from core.optim import build_optimizers
from grpo.reward_functions.registry import reward
from grpo.rewards import Rewards, Scored
from tests.tiny import (
    CAUSAL, causal_model, causal_policy, consumer, fill_policy, grpo_step, length_reward, optimizer_state,
    prompt_config, prompt_consumer)
from tests.trainers import prompt_trainer, run, trainer, training_records

NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("without_pictures")


def skipped(policy, reference, scorer, data, c):
    """Takes a step on rollouts that must be skipped; it moves neither the weights nor the optimizers."""
    optimizers = build_optimizers(policy, c)
    before = {name: p.clone() for name, p in policy.weights().items()}
    metrics = grpo_step(policy, reference, scorer, data, c, optimizers=optimizers)
    assert metrics["skipped_steps"] == 1 and metrics["empty_steps"] == 0
    assert all(torch.equal(p, before[name]) or p.isnan().all() for name, p in policy.weights().items())
    assert not optimizer_state(optimizers)


@pytest.mark.parametrize("kind, settings", [("fill", {"unmask_steps": 3}), ("fill", {"top_p": 0.9}), ("prompts", {})])
def test_a_policy_that_is_not_finite_samples_a_bad_step(dataset, prompts, kind, settings):
    c = prompt_config(**settings)
    policy, data = causal_policy(), prompt_consumer(prompts, c)
    if kind == "fill":
        policy, data = fill_policy(), consumer(dataset, c)
    reference = policy.frozen()
    with torch.no_grad():
        for p in policy.parameters():
            p.fill_(NAN)
    skipped(policy, reference, length_reward, data, c)


@pytest.mark.parametrize("settings, bad", [
    ({}, -INF), ({"zero_std": "resample"}, INF), ({"advantage": "gdpo"}, INF), ({"train_pass_k": 2}, -INF)],
    ids=str)
def test_a_reward_that_is_not_finite_makes_a_bad_step(prompts, settings, bad):
    @reward(0, 100)
    def lengths(completions):
        return [bad if i == 5 else float(len(text)) for i, text in enumerate(completions)]

    c = prompt_config(reward_functions=("lengths", "length_penalty"), kl_beta=0.0, **settings)
    skipped(causal_policy(), None, Rewards(c), prompt_consumer(prompts, c), c)


# Whole runs

class BadAt:
    """A rewards object: random, but at given steps the first completion's reward is infinite."""

    def __init__(self, steps):
        self.state, self.steps = SimpleNamespace(global_step=0), steps

    def __call__(self, rollouts):
        reward = torch.rand(rollouts.problems, 4)
        if self.state.global_step in self.steps:
            reward[0, 0] = INF
        return Scored(reward)


def bad_at(steps, dataset, out_dir, **settings):
    """A trainer of a fill-in policy; at these steps one reward is not finite."""
    return trainer(dataset, out_dir, BadAt(steps), **{"save_interval": 1, "max_iters": 6, "learning_rate": 1e-3,
                                                       "min_lr": 1e-3, "lr_decay_iters": 6} | settings)


def test_a_bad_step_moves_nothing_is_counted_and_named(dataset, tmp_path, capsys):
    t, weights = bad_at((2,), dataset, tmp_path), []
    inner = t.train_step
    t.train_step = lambda: (inner(), weights.append({k: v.clone() for k, v in t.policy.weights().items()}))[0]
    t.run()
    moved = [any(not torch.equal(a[k], b[k]) for k in a) for a, b in zip(weights, weights[1:])]
    assert moved == [True, False, True, True, True]
    records = training_records(tmp_path)
    assert [r["skipped_steps"] for r in records] == [0, 0, 1, 1, 1, 1]
    assert [r["mean_reward"] is None for r in records] == [False, False, True, False, False, False]
    shown, = [line for line in capsys.readouterr().out.split("\n") if "is skipped" in line]
    assert "step 3" in shown and "mean_reward" in shown


def test_rollouts_with_a_bad_reward_cost_one_step(dataset, tmp_path):
    """All eight minibatches would be skipped, more than max_bad_steps."""
    t = run(bad_at((8,), dataset, tmp_path, ppo_epochs=4, minibatches=2, max_iters=11, max_bad_steps=2))
    steps = [r["step"] for r in training_records(tmp_path) if "time/collect" in r]
    assert steps == [1, 9, 10] and t.skipped_steps == 1


# Steps without a reward

def skipping(name, skips, values=lambda n: [float(i) for i in range(n)]):
    """Registers a reward of this name; skips: (step, completion) -> whether it skips that one."""
    def look_up(completions, trainer_state):
        step = trainer_state.global_step
        return [None if skips(step, i) else x for i, x in enumerate(values(len(completions)))]

    look_up.__name__ = look_up.__qualname__ = name
    reward(0, 100)(look_up)


def test_steps_in_which_all_completions_are_skipped_are_said_and_end_the_run(prompts, tmp_path, capsys):
    skipping("down", lambda step, i: step != 1)
    settings = {"reward_functions": ("down",), "max_bad_steps": 2, "max_iters": 9}
    with pytest.raises(Mistake, match="max_bad_steps=2"):
        run(prompt_trainer(prompts, tmp_path, evaluates=False, **settings))
    records = training_records(tmp_path)
    assert [record["skipped/down"] == record["skipped_samples"] for record in records] == [True] * len(records)
    assert ["mean_reward" in record for record in records] == [False, True, False]
    lines = [line for line in capsys.readouterr().out.split("\n") if "skipped" in line]
    assert sum("step 1" in line and "down" in line for line in lines) == 1, "the first skip of a reward is said once"
    assert ["teaches nothing" in line for line in lines if "step 1" in line] == [False, True]


def test_rollouts_that_no_reward_scored_cost_one_step(prompts, tmp_path):
    skipping("down", lambda step, i: step == 4)
    t = run(prompt_trainer(prompts, tmp_path, evaluates=False, reward_functions=("down",), ppo_epochs=2, minibatches=2,
                           max_bad_steps=2, max_iters=7))
    assert [r["step"] for r in training_records(tmp_path) if "time/collect" in r] == [1, 5, 6]
    assert t.empty_steps >= 1 and t.bad.in_a_row == 0


@pytest.mark.parametrize(("skips", "values", "said"), [
    (lambda step, i: False, lambda n: [1.0] * n, True), (lambda step, i: i % 2, lambda n: [1.0] * n, True),
    (lambda step, i: False, lambda n: list(range(n)), False)], ids=["equal", "equal or skipped", "differ"])
def test_a_run_whose_groups_all_had_equal_rewards_says_so_at_its_end(prompts, tmp_path, capsys, skips, values, said):
    skipping("mine", skips, values)
    run(prompt_trainer(prompts, tmp_path, evaluates=False, reward_functions=("mine",), max_iters=3))
    assert ("nothing was learned" in capsys.readouterr().out) == said


def test_a_run_without_a_step_does_not_say_that_it_learned_nothing(prompts, tmp_path, capsys):
    run(prompt_trainer(prompts, tmp_path, evaluates=False, reward_functions=("length_penalty",), max_iters=0))
    assert "nothing was learned" not in capsys.readouterr().out


@pytest.mark.parametrize("settings", [
    {"advantage": "step", "group_size": 2}, {"overlong_buffer": 3}, {"zero_std": "resample", "skips": True}], ids=str)
def test_a_run_that_learned_from_other_than_groups_of_its_first_rounds_does_not_say_that_it_did_not(
        prompts, tmp_path, capsys, settings):
    rounds = []

    def values(n):
        rounds.append(n)
        first = len(rounds) % 2 == 1
        return [float(i // 2) if "advantage" in settings else 1.0 if first else float(i) for i in range(n)]

    skips = settings.pop("skips", False)
    skipping("mine", lambda step, i: skips and len(rounds) % 2 == 1, values)
    if "overlong_buffer" in settings:
        skipping("mine", lambda step, i: False, lambda n: [1.0] * n)
    t = run(prompt_trainer(prompts, tmp_path, evaluates=False, reward_functions=("mine",), max_iters=2, kl_beta=0.0,
                           max_bad_steps=1, **settings))
    assert t.reward_messages.taught and any(record["grad_norm"] > 0 for record in training_records(tmp_path))
    assert "nothing" not in capsys.readouterr().out


VALUES = {  # {name: n -> the values of n completions}
    "equal": lambda n: [0.25] * n, "unlike": lambda n: [float(i) for i in range(n)],
    "against": lambda n: [-float(i) for i in range(n)], "groupwise": lambda n: [float(i // 4) for i in range(n)],
    "skipped": lambda n: [None] * n, "highest": lambda n: [100.0] * n}


IN_REWARD = {"kl_in_reward": True, "kl_beta": 0.1, "advantage": "group_std"}


@pytest.mark.parametrize(("values", "settings", "named"), [
    ("equal equal", {}, {"one": 0.25, "two": 0.25}), ("equal unlike", {}, {"one": 0.25}), ("unlike unlike", {}, {}),
    ("equal", {"max_iters": 2}, {"one": 0.25}), ("equal unlike", {"reward_weights": (0.0, 1.0)}, {}),
    ("equal unlike", {"reward_weights": (1.0, 0.0)}, {"one": 0.25}), ("highest unlike", {}, {}),
    ("highest highest", {}, {"one": 100.0, "two": 100.0}),
    ("groupwise", {}, {"one": 1.5}), ("groupwise", {"advantage": "step"}, {}),
    ("equal", {"advantage": "step"}, {"one": 0.25}), ("unlike against", {}, {"one": 7.5, "two": -7.5}),
    ("equal", IN_REWARD, {"one": 0.25}), ("equal unlike", IN_REWARD, {"one": 0.25}),
    ("equal", {"overlong_buffer": 3}, {"one": 0.25}), ("equal", {"zero_std": "drop"}, {"one": 0.25}),
    ("equal", {"zero_std": "resample"}, {"one": 0.25}), ("unlike", {"mask_truncated": True}, {}),
    ("skipped", {"max_bad_steps": 9}, {}), ("equal skipped", {}, {"one": 0.25}),
    ("equal unlike", {"advantage": "gdpo"}, {"one": 0.25}),
    ("equal", {"ppo_epochs": 2, "minibatches": 2}, {"one": 0.25})], ids=str)
def test_rewards_that_differ_in_no_group_of_the_first_steps_are_named_once_with_their_value(
        prompts, tmp_path, capsys, values, settings, named):
    names = ("one", "two")[: len(values.split())]
    for name, of in zip(names, values.split(), strict=True):
        skipping(name, lambda step, i: False, VALUES[of])
    t = run(prompt_trainer(prompts, tmp_path, evaluates=False, reward_functions=names, **{
        "max_iters": 5, "kl_beta": 0.0} | settings))
    last = min(3, t.step)
    lines = [line for line in capsys.readouterr().out.split("\n") if line.startswith(f"steps 1 to {last}:")]
    assert len(lines) == bool(named)
    for line in lines:
        found = dict(re.findall(r"\b(one|two) \D*?(-?[\d.]+)", line))
        assert {name: float(x) for name, x in found.items()} == named and "temperature" in line


def test_a_reward_is_named_only_if_it_differed_in_none_of_the_first_steps_and_anew_after_a_resume(
        prompts, tmp_path, capsys):
    skipping("mine", lambda step, i: False, lambda n: [float(i * (t.step == 2)) for i in range(n)])
    for step, said in ((4, []), (6, ["5 to 6"]), (11, ["7 to 9"])):
        t = prompt_trainer(prompts, tmp_path, evaluates=False, reward_functions=("mine",), max_iters=step)
        run(t, resume=step > 4)
        assert re.findall(r"^steps (\d+ to \d+): .*\bmine 0\b", capsys.readouterr().out, re.M) == said


@pytest.mark.parametrize("first", [True, False])
def test_groups_that_were_sampled_anew_count(prompts, tmp_path, capsys, first):
    """With zero_std="resample" only the rewards of the first round, or of none, are equal."""
    rounds = []

    def values(n):
        rounds.append(n)
        return [float(i) if len(rounds) % 2 == 0 or not first else 1.0 for i in range(n)]

    skipping("mine", lambda step, i: False, values)
    t = run(prompt_trainer(prompts, tmp_path, evaluates=False, reward_functions=("mine",), max_iters=4, kl_beta=0.0,
                           zero_std="resample", mask_truncated=True))
    assert (training_records(tmp_path)[0]["frac_reward_zero_std"] == 1) == first
    assert t.step == 4 and "steps 1 to 3" not in capsys.readouterr().out


def save_teacher(path):
    save_model(str(path), causal_model(seed=3), CAUSAL)
    return str(path)


def test_a_teacher_alone_has_no_rewards_to_name(prompts, tmp_path, capsys):
    t = prompt_trainer(prompts, tmp_path / "out", evaluates=False, kl_beta=0.0, max_iters=4, task_type="fill_in",
                       teacher_checkpoint=save_teacher(tmp_path / "teacher.safetensors"))
    run(t)
    assert "steps 1 to 3" not in capsys.readouterr().out


def test_a_judge_that_fails_now_and_then_makes_no_difference_out_of_nothing(prompts, tmp_path):
    """Two judges that give 1 to every completion: one that a call failed for is not worse than its group."""
    fails = random.Random(0)
    for name in ("first", "second"):
        skipping(name, lambda step, i: fails.random() < 0.3, lambda n: [1.0] * n)
    t = run(prompt_trainer(prompts, tmp_path, evaluates=False, reward_functions=("first", "second"), max_iters=4,
                           kl_beta=0.0))
    for record in training_records(tmp_path):
        assert record["std_reward"] == 0 and record["mean_reward"] == 2 and record["grad_norm"] == 0
        assert 0 < record["skipped_samples"] <= record["skipped/first"] + record["skipped/second"] < 16
    assert t.empty_steps == 4
