"""Whole GRPO runs: what runs once per rollout, what moves after an iteration, interrupted runs and their states."""

import json
import math
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from core import checkpoint_manager
from core.files.json_lines import read_records
from core.files.whole_files import CannotWrite
from core.logger import Logger
from core.models import load_model
from core.training_step import build_optimizers
from grpo import grpo_trainer
from grpo.build import Models, build_data, build_models, build_reference, fill_in_evaluation
from grpo.data_buffer import DataBuffer
from grpo.evaluation.prompts import PromptEvaluation
from grpo.grpo_config import GRPOConfig
from grpo.grpo_trainer import GRPOTrainer
from grpo.objectives import OBJECTIVES
from grpo.report import plots
from grpo.reward_functions.judge import Judge
from grpo.reward_functions.trl import TrainerState
from grpo.rewards import Rewards, Scored
from tests.tiny import (
    TOKENIZER,
    causal_policy,
    collect,
    config,
    consumer,
    count_rows,
    fill_policy,
    grpo_step,
    judge,
    one_process,
    prompt_consumer,
    rewards,
    same,
    same_momentum,
    share_of_e,
    train,
    undocumented,
    without_clock,
)


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Drawing the curves takes most of the time of a short run."""
    monkeypatch.setattr(plots, "draw_curves", lambda runs, path: None)


class Calls:
    """A rewards object that counts how often it is called."""

    def __init__(self, inner):
        self.inner, self.count = inner, 0

    def __call__(self, rollouts):
        self.count += 1
        return self.inner(rollouts)


def no_evaluation(policy, temperature):
    return {"kl": 0.0}, []


def trainer(dataset, out_dir, reward=None, policy=None, resume=False, **settings):
    """A trainer of a fill-in policy, without an evaluation."""
    c = config(**{"dataset": dataset, "out_dir": str(out_dir), "eval_interval": 100, "sample_interval": 100} | settings)
    dist, policy = one_process(), policy or fill_policy(seed=1, scale=3.0)
    reference, reward = build_reference(c, policy, dist), reward or Calls(rewards(c, judge()))
    t = GRPOTrainer(policy, reference, reward, consumer(dataset, c), no_evaluation, c,
                    Logger(c.out_dir, c.max_iters, ("loss",)), dist)
    if resume:
        t.resume()
    return t


def evaluated(dataset, out_dir, resume=False, **settings):
    """A whole run of a fill-in policy with a judge and its evaluation."""
    c = config(dataset=dataset, out_dir=str(out_dir), eval_problems=4, eval_completions=2, grad_clip=1.0,
               learning_rate=1e-3, min_lr=1e-4, lr_decay_iters=6, log_interval=1, eval_interval=3, sample_interval=3,
               save_interval=3, **settings)
    dist, policy, scorer = one_process(), fill_policy(seed=1, scale=3.0), judge()
    models = Models(policy, build_reference(c, policy, dist), Judge(scorer, TOKENIZER, reads_ids=True), None)
    evaluation = fill_in_evaluation(c, models)
    return finished(GRPOTrainer(policy, models.reference, rewards(c, scorer), consumer(dataset, c), evaluation, c,
                                Logger(c.out_dir, c.max_iters, evaluation.columns), dist), resume)


def causal(prompts, out_dir, resume=False, **changes):
    """A whole run of a causal policy and its evaluation."""
    c = config(**{"out_dir": str(out_dir), "max_new_tokens": 5, "task_type": "general", "eval_problems": 4,
                  "eval_completions": 4, "pass_k": 2, "length_min": 1, "length_max": 6, "learning_rate": 1e-3,
                  "min_lr": 1e-4, "lr_decay_iters": 6, "eval_interval": 3, "sample_interval": 3, "save_interval": 3,
                  "success_reward": "length_penalty"} | changes)
    dist, policy = one_process(), causal_policy(seed=1, scale=3.0)
    data, scoring = prompt_consumer(prompts, c), Rewards(c)
    reference = build_reference(c, policy, dist)
    evaluation = PromptEvaluation(data, reference, scoring, c)
    return finished(GRPOTrainer(policy, reference, scoring, data, evaluation, c,
                                Logger(c.out_dir, c.max_iters, evaluation.columns), dist), resume)


def finished(t, resume):
    if resume:
        t.resume()
    t.run()
    return t


def records(out_dir):
    return read_records(os.path.join(out_dir, "metrics.jsonl"))


def training_records(out_dir):
    return [r for r in records(out_dir) if "loss" in r]


def test_a_rollout_serves_all_its_epochs_and_everything_else_runs_once(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=12, ppo_epochs=3, minibatches=2)
    read, reference_read = count_rows(t.policy.model), count_rows(t.reference.model)
    t.run()
    assert t.rewards.count == 2 and t.iteration == 2 and t.step == 12
    B = t.config.batch_size
    assert sum(reference_read) == 2 * B, "once per problem and rollout, not per epoch"
    assert sum(read) == 2 * (B + B + 3 * B), "sampling, old log-probabilities, and one shared read per epoch"
    steps = training_records(tmp_path)
    assert [r["step"] for r in steps] == list(range(1, 13))
    assert steps[0]["kl_to_old"] == 0 and steps[6]["kl_to_old"] == 0, "the first step of an iteration has ratio 1"
    assert steps[5]["kl_to_old"] > steps[1]["kl_to_old"] > 0
    assert max(r["clip_fraction"] for r in steps) > 0
    phases = [{name for name in r if name.startswith("time/")} for r in steps]
    collected = {f"time/{name}" for name in ("collect", "reference", "reward", "advantage", "rescore", "train")}
    assert phases == ([collected] + [{"time/train"}] * 5) * 2, "collecting takes time in its first step alone"


def test_one_epoch_of_one_minibatch_is_the_on_policy_step(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=3)
    t.run()
    c, policy = t.config, fill_policy(seed=1, scale=3.0)
    reference, optimizers, data = policy.frozen(), build_optimizers(policy, c), consumer(dataset, c)
    for number in range(3):
        grpo_step(policy, reference, rewards(c, judge()), data, c, number, optimizers)
    assert same(policy, t.policy)


def test_steps_that_share_rollouts_are_those_taken_by_hand(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=8, ppo_epochs=2, minibatches=2)
    t.run()
    c, policy, found = t.config, fill_policy(seed=1, scale=3.0), []
    reference, optimizers, data = policy.frozen(), build_optimizers(policy, c), consumer(dataset, c)
    for number in (0, 1):
        experience = collect(policy, rewards(c, judge()), data, c, reference, number=number)
        halves = []
        for epoch in (0, 1):
            order = np.random.default_rng([3, c.seed, 0, number + 1, epoch]).permutation(4)
            halves += [sorted(order[:2]), sorted(order[2:])]
        for i, half in enumerate(halves):
            part, _ = experience.rollouts.select(torch.tensor(half))
            found.append(train(policy, replace(experience, rollouts=part, on_policy=i == 0), c, optimizers))
    assert same(policy, t.policy)
    logged = without_clock(training_records(tmp_path))
    for step, by_hand in enumerate(found):
        expected = by_hand | {"step": step + 1, "lr": c.learning_rate, "kl_beta": c.kl_beta}
        del expected["bad_rollouts"], expected["text_tokens"]  # the second becomes tokens_per_second
        assert logged[step] == expected
    assert len(logged) == len(found) == 8


@pytest.mark.parametrize("cut", [{"batch_size": 1, "gradient_accumulation_steps": 4},
                                 {"batch_size": 2, "gradient_accumulation_steps": 2}])
def test_accumulated_micro_batches_are_the_same_problems_as_one_batch(dataset, tmp_path, cut):
    whole, parts = trainer(dataset, tmp_path / "a"), trainer(dataset, tmp_path / "b", **cut)
    for again in (0, 1):
        one, other = whole.problems_of(0, again), parts.problems_of(0, again)
        assert all((one[key] == other[key]).all() for key in one) and len(one["number"]) == 4
    assert (whole.problems_of(0, 0)["input"] != whole.problems_of(0, 1)["input"]).any()


OF_TWO_STEPS = {"max_iters": 2, "kl_target": 1e-3}


@pytest.fixture(scope="module")
def state_of_two_steps(dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_steps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_curves", lambda runs, path: None)
        trainer(dataset, folder, **OF_TWO_STEPS).run()
    return folder


MOVING = [{"ppo_epochs": 2, "minibatches": 2}, {"reference_mode": "ema", "ema_alpha": 0.8},
          {"reference_mode": "periodic", "reference_update_freq": 2}, {"kl_target": 1e-3},
          {"kl_in_reward": True}, {"reference_mode": "none", "kl_beta": 0.0, "ppo_epochs": 3}]


@pytest.mark.parametrize("settings", MOVING, ids=lambda s: "-".join(map(str, s.values())))
def test_a_resumed_run_equals_the_uninterrupted_one(dataset, tmp_path, settings):
    uncut = trainer(dataset, tmp_path / "uncut", max_iters=8, lr_decay_iters=8, **settings)
    uncut.run()
    trainer(dataset, tmp_path / "cut", max_iters=5, lr_decay_iters=8, **settings).run()
    resumed = trainer(dataset, tmp_path / "cut", max_iters=8, lr_decay_iters=8, resume=True, **settings)
    assert "ppo_epochs" not in settings or resumed.buffer.queue, "it was cut within an iteration"
    resumed.run()
    assert same(uncut.policy, resumed.policy) and uncut.kl_beta == resumed.kl_beta
    assert uncut.iteration == resumed.iteration and uncut.buffer.stored == resumed.buffer.stored
    assert uncut.reference is None or same(uncut.reference, resumed.reference)


def test_a_resumed_run_with_evaluation_equals_the_uninterrupted_one_bit_for_bit(dataset, tmp_path):
    whole = evaluated(dataset, tmp_path / "whole", max_iters=6)
    evaluated(dataset, tmp_path / "cut", max_iters=3)
    resumed = evaluated(dataset, tmp_path / "cut", max_iters=6, resume=True)
    assert whole.step == resumed.step == 6
    assert same(whole.policy, resumed.policy)
    assert same_momentum(whole.optimizers, resumed.optimizers)
    assert whole.before == resumed.before
    assert without_clock(records(tmp_path / "whole")) == without_clock(records(tmp_path / "cut"))


def test_a_resumed_causal_run_equals_the_uninterrupted_one_bit_for_bit(prompts, tmp_path):
    whole = causal(prompts, tmp_path / "whole", max_iters=6)
    causal(prompts, tmp_path / "cut", max_iters=3)
    resumed = causal(prompts, tmp_path / "cut", max_iters=6, resume=True)
    assert same(whole.policy, resumed.policy)
    logged = without_clock(records(tmp_path / "whole"))
    assert logged == without_clock(records(tmp_path / "cut"))
    canonical = {"completion_length", "truncated", "skipped_samples", "reward/length_penalty", "mean_kl", "entropy"}
    assert canonical <= set(logged[1])
    assert {"eval/greedy_accuracy", "eval/pass_at_k", "eval/kl", "eval/reward/length_penalty"} <= set(logged[0])
    assert not undocumented({key for record in logged for key in record} - {"step"})


@pytest.mark.parametrize("at", [2, 5])
def test_a_signal_ends_the_run_after_its_step_and_a_resumed_run_has_the_same_bits(dataset, tmp_path, capsys, at):
    """The signal comes while rewards are computed, within an iteration or before its first step."""
    settings = {"max_iters": 8, "lr_decay_iters": 8, "ppo_epochs": 2, "reference_mode": "ema", "kl_target": 1e-3}
    uncut = trainer(dataset, tmp_path / "uncut", **settings)
    uncut.run()
    inner, calls = rewards(config(), judge()), []

    def reward(rollouts):
        calls.append(1)
        if len(calls) == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(rollouts)

    cut = trainer(dataset, tmp_path / "cut", reward, **settings)
    cut.run()
    assert cut.step == 2 * at - 3 and not (tmp_path / "cut" / "curves.png").exists()
    assert f"stopped by SIGTERM after step {cut.step}; go on with --resume=True" in capsys.readouterr().out
    resumed = trainer(dataset, tmp_path / "cut", resume=True, **settings)
    resumed.run()
    assert same(uncut.policy, resumed.policy) and same(uncut.reference, resumed.reference)
    assert without_clock(records(tmp_path / "uncut")) == without_clock(records(tmp_path / "cut"))


@pytest.mark.parametrize("in_step", [True, False])
def test_after_a_signal_the_run_is_saved_at_once_and_evaluated_when_it_goes_on(dataset, tmp_path, in_step):
    """The evaluation of step 2 is the resumed run's, unless the signal comes in it."""
    settings = {"max_iters": 4, "lr_decay_iters": 4, "eval_interval": 2, "sample_interval": 2, "keep_checkpoints": 2}

    def run(name, signalled=False, resume=False):
        def signal_at(step):
            if signalled and t.step == step:
                os.kill(os.getpid(), signal.SIGTERM)

        def reward(rollouts):
            signal_at(1 if in_step else None)
            return inner(rollouts)

        def evaluation(policy, temperature):
            signal_at(None if in_step else 2)
            return {"kl": float(sum(p.detach().sum() for p in policy.parameters()))}, []

        inner = rewards(config(), judge())
        t = trainer(dataset, tmp_path / name, reward, **settings)
        t.evaluation = evaluation
        return finished(t, resume)

    uncut, cut = run("uncut"), run("cut", signalled=True)
    assert cut.step == 2 and cut.evaluated == (not in_step)
    resumed = run("cut", resume=True)
    assert same(uncut.policy, resumed.policy) and (uncut.before, uncut.after) == (resumed.before, resumed.after)
    assert uncut.buffer.evaluations == resumed.buffer.evaluations
    assert without_clock(records(tmp_path / "uncut")) == without_clock(records(tmp_path / "cut"))


def test_after_a_damaged_state_the_run_goes_on_from_the_one_before(dataset, tmp_path, capsys):
    settings = {"max_iters": 4, "lr_decay_iters": 4, "save_interval": 1}
    uncut = trainer(dataset, tmp_path / "uncut", **settings)
    uncut.run()
    trainer(dataset, tmp_path / "cut", **settings | {"max_iters": 3}).run()
    (tmp_path / "cut" / "state.pt").write_bytes(b"PK")
    resumed = trainer(dataset, tmp_path / "cut", resume=True, **settings)
    assert resumed.step == 2 and "state.pt is damaged or cut short" in capsys.readouterr().out
    resumed.run()
    assert same(uncut.policy, resumed.policy)
    assert without_clock(records(tmp_path / "uncut")) == without_clock(records(tmp_path / "cut"))


@pytest.mark.parametrize("failing", ["model.safetensors", "state.pt"])
def test_a_run_cut_within_a_save_and_resumed_ends_with_the_policy_of_an_uncut_one(dataset, tmp_path, monkeypatch,
                                                                                  failing):
    """The second save, at step 4, is cut before it has written the file."""
    settings = {"max_iters": 4, "save_interval": 2, "lr_decay_iters": 4}
    uncut = trainer(dataset, tmp_path / "uncut", **settings)
    uncut.run()
    replace = os.replace

    def fails_late(source, target):
        if str(target).endswith(failing) and cut.step == 4:
            raise KeyboardInterrupt
        replace(source, target)

    cut = trainer(dataset, tmp_path / "cut", **settings)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_manager.os, "replace", fails_late)
        with pytest.raises(KeyboardInterrupt):
            cut.run()
    resumed = trainer(dataset, tmp_path / "cut", resume=True, **settings)
    assert resumed.step == 2, "the state of the save before is whole"
    resumed.run()
    final, facts = load_model(str(tmp_path / "cut" / "model.safetensors"))
    assert same(final, uncut.policy) and facts["step"] == 4


def test_max_iters_is_the_number_of_optimizer_steps_and_everything_is_written(dataset, tmp_path, capsys,
                                                                              monkeypatch):
    monkeypatch.undo()  # with the picture
    t = evaluated(dataset, tmp_path, max_iters=5)
    counts = {int(s["step"]) for o in t.optimizers for s in o.state_dict()["state"].values()}
    assert counts == {5}
    assert sorted(os.listdir(tmp_path)) == ["console.log", "curves.png", "metrics.jsonl", "model.safetensors",
                                            "report.html", "samples.jsonl", "state-000003.pt", "state.pt"]
    final, facts = load_model(str(tmp_path / "model.safetensors"))
    assert same(final, t.policy) and facts["step"] == 5 and "eval/judge" in facts
    training = training_records(tmp_path)
    assert [r["step"] for r in training] == [1, 2, 3, 4, 5]
    canonical = {"loss", "pg_loss", "kl_penalty", "mean_reward", "std_reward", "mean_advantage", "mean_kl",
                 "mean_log_prob", "entropy", "clip_fraction", "grad_norm", "lr", "frac_reward_zero_std",
                 "unique_completions", "mean_token_accuracy", "reward/judge", "tokens_per_second", "time/collect",
                 "time/reward", "time/train", "skipped_steps", "empty_steps"}
    assert canonical <= set(training[0])
    assert not undocumented({key for record in records(tmp_path) for key in record} - {"step"})
    assert json.loads(open(tmp_path / "samples.jsonl").readline())["best_score"] > 0
    shown = capsys.readouterr().out
    assert "held-out" in shown and "before" in shown and "change" in shown and "best" in shown


def test_the_pages_of_a_run_of_any_length_cost_time_in_proportion(dataset, tmp_path, monkeypatch):
    """Each page reads the whole file. Here a page is due when the run has grown by a half, not by a fiftieth."""
    steps = []
    monkeypatch.setattr(grpo_trainer, "GROWTH", 1.5)
    monkeypatch.setattr(GRPOTrainer, "write_page", lambda trainer: steps.append(trainer.step))
    evaluated(dataset, tmp_path, max_iters=18)
    assert steps == [0, 3, 6, 9, 15] and sum(steps) <= 18 * 1.5 / 0.5


def test_the_report_is_written_after_the_first_evaluation_and_later_after_the_state(dataset, tmp_path, monkeypatch):
    def fails_late(folder):
        state = tmp_path / "state.pt"
        steps.append((records(folder)[-1]["step"], state.exists() and torch.load(state, weights_only=True)["step"]))
        if len(steps) == 3:
            raise KeyboardInterrupt
    steps = []
    monkeypatch.setattr(grpo_trainer, "write_report", fails_late)
    with pytest.raises(KeyboardInterrupt):
        trainer(dataset, tmp_path, max_iters=4, eval_interval=2, save_interval=2).run()
    assert steps == [(0, False), (2, 2), (4, 4)]


@pytest.mark.parametrize("name, line", [("samples.jsonl", "no JSON"), ("metrics.jsonl", "[1]"),
                                        ("metrics.jsonl", '{"step": 2, "loss": "a", "eval/kl": [2]}'),
                                        ("samples.jsonl", '{"step": 2, "best": 1, "filled": 5}'),
                                        ("starts.jsonl", '{"step": 0, "settings": 5}'), ("config.json", "{")])
def test_a_damaged_file_ends_no_run_through_the_report(dataset, tmp_path, capsys, name, line):
    def reward(rollouts):
        calls.append(1)
        if len(calls) == 2:
            with open(tmp_path / name, "a") as f:
                f.write(line + "\n")
        return inner(rollouts)
    calls, inner = [], rewards(config(), judge())
    t = trainer(dataset, tmp_path, reward, max_iters=3)
    t.run()
    shown = capsys.readouterr().out
    assert t.step == torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 3 and "held-out" in shown
    lines = [x for x in shown.split("\n") if x.startswith("report.html is not written: ")]
    assert len(lines) == 1 and (line[0] in "{" or f"{name}, line" in lines[0]), shown


def test_a_disk_that_is_full_when_the_report_is_written_still_ends_the_run(dataset, tmp_path, monkeypatch):
    def full(folder):
        raise CannotWrite("report.html could not be written")
    monkeypatch.setattr(grpo_trainer, "write_report", full)
    with pytest.raises(CannotWrite):
        trainer(dataset, tmp_path, max_iters=1).run()


def test_another_seed_is_another_run(dataset, tmp_path):
    a, b = (evaluated(dataset, tmp_path / str(seed), max_iters=2, seed=seed) for seed in (1, 2))
    assert not same(a.policy, b.policy) and a.before == b.before, "the held-out problems are the same for every seed"


def test_the_reference_moves_once_after_each_iteration(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=4, ppo_epochs=2, reference_mode="ema", ema_alpha=0.75)
    expected = [p.clone() for p in t.reference.parameters()]
    for number in range(4):
        t.train_step()
        if number % 2:
            expected = [0.75 * e + 0.25 * p for e, p in zip(expected, t.policy.parameters(), strict=True)]
        for p, e in zip(t.reference.parameters(), expected, strict=True):
            torch.testing.assert_close(p, e)


def test_steps_in_which_no_reward_scores_anything_are_told_once(dataset, tmp_path, capsys):
    steps = iter([True, False, False, True, False])  # whether the rewards of a step score
    reward = lambda rollouts: Scored(torch.rand(4, 4) if next(steps) else torch.full((4, 4), math.nan))
    trainer(dataset, tmp_path, reward=reward, max_iters=5, log_interval=1).run()
    told = [line for line in capsys.readouterr().out.splitlines() if "no reward scored a completion" in line]
    assert [line.split(":")[0] for line in told] == ["step 2", "step 5"]
    assert "all of them returned None or were late (reward_timeout)" in told[0]
    assert [("mean_reward" in r, "entropy" in r) for r in training_records(tmp_path)] == [
        (scored, scored) for scored in (True, False, False, True, False)]


def test_kl_beta_moves_once_after_each_iteration(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=6, ppo_epochs=2, kl_beta=0.1, kl_target=1e-3, learning_rate=3e-2)
    t.run()
    kl_beta, moved = 0.1, 0
    for number, record in enumerate(training_records(tmp_path)):
        assert record["kl_beta"] == pytest.approx(kl_beta, rel=1e-12)
        if number % 2:  # the controller of arXiv 1909.08593 section 2.2
            error = record["mean_kl"] / 1e-3 - 1
            kl_beta, moved = kl_beta * (1 + 0.1 * min(0.2, max(-0.2, error))), moved + (record["mean_kl"] > 0)
    assert moved == 3 and t.kl_beta == pytest.approx(kl_beta, rel=1e-12) and t.kl_beta != 0.1


def test_the_trainer_calls_the_buffer_in_order(dataset, tmp_path):
    calls = []

    class Recorder(DataBuffer):
        def __getattribute__(self, name):
            if name in ("store_rollout_data", "prepare_training_batch", "next_minibatch", "store_evaluation_data"):
                calls.append(name)
            return super().__getattribute__(name)

    t = trainer(dataset, tmp_path, max_iters=4, ppo_epochs=2)
    t.buffer = Recorder()
    t.run()
    one = ["store_rollout_data", "prepare_training_batch", "next_minibatch", "next_minibatch"]
    assert calls == ["store_evaluation_data", *one, *one, "store_evaluation_data"]
    assert t.buffer.get_buffer_statistics() == {"rollouts": 0, "completions": 0, "minibatches": 0, "stored": 2,
                                                "evaluations": 2}


def test_rewards_know_how_many_steps_are_done(dataset, tmp_path):
    """Before each step, before each evaluation, with several steps in an iteration, and after a resume."""
    seen = []

    class Watching(Calls):
        state = TrainerState()

        def __call__(self, rollouts):
            seen.append(self.state.global_step)
            return super().__call__(rollouts)

    def run(steps, resume):
        t = trainer(dataset, tmp_path, Watching(share_of_e), resume=resume, max_iters=steps, ppo_epochs=2,
                    eval_interval=2, save_interval=2)
        t.evaluation = lambda policy, temperature: (seen.append(f"evaluation {t.rewards.state.global_step}")
                                                    or {"kl": 0.0}, [])
        t.run()

    run(4, False)
    assert seen == ["evaluation 0", 0, "evaluation 2", 2, "evaluation 4"]
    seen.clear()
    Watching.state.global_step = 0
    run(6, True)
    assert seen == [4, "evaluation 6"]


def flat_in_odd_iterations():
    """A rewards object: random, but all equal in every second call."""
    calls = []

    def scored(rollouts):
        calls.append(None)
        shape = (rollouts.problems, rollouts.group_size)
        return Scored(torch.ones(shape) if len(calls) % 2 == 0 else torch.rand(shape))
    return scored


@pytest.mark.parametrize("minibatches", [1, 2])
def test_steps_without_a_group_are_counted_and_leave_the_policy_alone(dataset, tmp_path, minibatches):
    t = trainer(dataset, tmp_path, Calls(flat_in_odd_iterations()), zero_std="drop", kl_beta=0.0, weight_decay=0.5,
                max_iters=4 * minibatches, minibatches=minibatches)
    for number in range(4 * minibatches):
        before = {name: p.clone() for name, p in t.policy.weights().items()}
        metrics = t.train_step()
        moved = any(not torch.equal(p, before[name]) for name, p in t.policy.weights().items())
        empty = number // minibatches % 2 == 1
        assert moved != empty, "momentum and weight decay move nothing where no group is left"
        assert metrics["empty_steps"] == t.empty_steps == minibatches * (number // minibatches // 2) + (
            number % minibatches + 1 if empty else minibatches * (number // minibatches % 2))
    assert t.empty_steps == 2 * minibatches and t.skipped_steps == 0


def test_empty_steps_go_on_being_counted_after_a_resume(dataset, tmp_path):
    flat = lambda rollouts: Scored(torch.ones(rollouts.problems, rollouts.group_size))
    settings = {"zero_std": "drop", "kl_beta": 0.0, "save_interval": 1}
    trainer(dataset, tmp_path, Calls(flat), max_iters=2, **settings).run()
    resumed = trainer(dataset, tmp_path, Calls(flat), max_iters=3, resume=True, **settings)
    assert resumed.empty_steps == 2
    resumed.run()
    assert [r["empty_steps"] for r in training_records(tmp_path)] == [1, 2, 3]


def test_every_key_of_every_setting_is_documented(dataset, prompts, tmp_path):
    for i, settings in enumerate(({"objective": "dr_grpo", "kl_in_reward": True, "zero_std": "resample"},
                                  {"kl_target": 0.1, "ppo_epochs": 2, "minibatches": 2, "entropy_bonus": 0.01})):
        trainer(dataset, tmp_path / str(i), max_iters=2, **settings).run()
        logged = {key for r in records(tmp_path / str(i)) for key in r} - {"step"}
        assert "loss" in logged and not undocumented(logged)
    causal(prompts, tmp_path / "causal", max_iters=1, overlong_buffer=4)
    logged = {key for r in records(tmp_path / "causal") for key in r} - {"step"}
    assert "reward/overlong" in logged and not undocumented(logged)
    assert undocumented(["loss2", "eval/x"]), "the check itself finds what is not there"


def test_a_state_without_buffers_is_refused_in_one_line(dataset, tmp_path):
    trainer(dataset, tmp_path, max_iters=1).run()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    del state["buffers"]
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="not saved by this version") as error:
        trainer(dataset, tmp_path, max_iters=2, resume=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", [{"iteration": -1}, {"iteration": 9}, {"skipped_steps": -1}, {"empty_steps": "0"},
                                    {"evaluated": 7}, {"reference": {"a": 1}}, {"reference": 3},
                                    {"kl_beta": float("nan")}, {"kl_beta": None}], ids=str)
def test_a_state_with_a_value_that_cannot_be_is_refused_in_one_line(state_of_two_steps, dataset, change):
    path = state_of_two_steps / "state.pt"
    state = torch.load(path, weights_only=True)
    torch.save(state | change, path)
    try:
        with pytest.raises(ValueError, match="state.pt was not saved by this version") as error:
            trainer(dataset, state_of_two_steps, resume=True, **OF_TWO_STEPS)
        assert "\n" not in str(error.value)
    finally:
        torch.save(state, path)
    assert trainer(dataset, state_of_two_steps, resume=True, **OF_TWO_STEPS).step == 2


def older(saved):
    """Rollouts as an earlier version saved them: the fields of what is read lie beside the others."""
    reading = saved.pop("reading")
    return saved | {"inputs": reading["texts"].flatten(1), "problems": len(reading["texts"]), "scored": saved["mask"]}


@pytest.mark.parametrize("change", [
    older, lambda saved: saved | {"behaviour_logp": saved["old_logp"]},
    lambda saved: {name: x for name, x in saved.items() if name != "group_size"},
    lambda saved: saved | {"reading": saved["reading"] | {"prompt": None}}],
    ids=["older names", "unknown field", "missing field", "another kind of reading"])
def test_a_state_saved_within_an_iteration_by_another_version_is_refused_in_one_line(dataset, tmp_path, change):
    trainer(dataset, tmp_path, max_iters=1, ppo_epochs=2, save_interval=1).run()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    rollouts = state["buffers"][0]["rollouts"]
    assert len(rollouts) == 1, "it was saved within an iteration"
    state["buffers"][0]["rollouts"] = {id: (change(saved), sums) for id, (saved, sums) in rollouts.items()}
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="state.pt was saved within an iteration by another version.*start w") as e:
        trainer(dataset, tmp_path, max_iters=2, ppo_epochs=2, resume=True)
    assert "\n" not in str(e.value)


def test_a_state_between_two_iterations_of_another_number_of_ranks_can_be_resumed(dataset, tmp_path):
    trainer(dataset, tmp_path, max_iters=2, ppo_epochs=2).run()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    state["buffers"] *= 2
    torch.save(state, tmp_path / "state.pt")
    resumed = trainer(dataset, tmp_path, max_iters=4, ppo_epochs=2, resume=True)
    resumed.run()
    assert resumed.step == 4
    state["buffers"][0]["queue"] = [(1, 0, 0, 1)]
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="saved within an iteration on 2 ranks; resume it on as many"):
        trainer(dataset, tmp_path, max_iters=4, ppo_epochs=2, resume=True)


def test_a_run_without_a_reference_is_not_resumed_with_one(dataset, tmp_path):
    trainer(dataset, tmp_path, max_iters=1, kl_beta=0.0).run()
    with pytest.raises(ValueError, match="without a reference; resume it with kl_beta=0.0"):
        trainer(dataset, tmp_path, max_iters=2, resume=True)


def test_a_reference_of_other_weights_is_refused_in_one_line(dataset, tmp_path):
    trainer(dataset, tmp_path, max_iters=1).run()
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    state["reference"].popitem()
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="state.pt has a reference of other weights than reference_mode='static'") as e:
        trainer(dataset, tmp_path, max_iters=2, resume=True)
    assert "\n" not in str(e.value)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder of a Hugging Face model, file of prompts)."""
    pytest.importorskip("transformers"), pytest.importorskip("peft")
    from tests.families import model_folder, write_sums
    folder = tmp_path_factory.mktemp("llama")
    return model_folder(folder / "model", "llama", n_layer=1), write_sums(folder / "sums.jsonl")


def share_of_low_ids(rollouts):
    """A rewards object: the share of a completion's tokens whose id is below 150."""
    low = ((rollouts.target < 150) * rollouts.mask).sum(1) / rollouts.mask.sum(1)
    return Scored(low.view(rollouts.problems, rollouts.group_size))


def adapted(llama, out_dir, resume=False, **settings):
    """A trainer of a Hugging Face model with an adapter, without an evaluation."""
    c = GRPOConfig(**{"generator_checkpoint": llama[0], "dataset": llama[1], "out_dir": str(out_dir), "device": "cpu",
                      "batch_size": 2, "group_size": 4, "max_new_tokens": 4, "lora_rank": 4, "learning_rate": 1e-2,
                      "lr_decay_iters": 4, "warmup_iters": 0, "task_type": "general", "eval_interval": 100,
                      "sample_interval": 100} | settings)
    dist = one_process()
    data = build_data(c, dist)
    models = build_models(c, data, dist)
    t = GRPOTrainer(models.policy, models.reference, share_of_low_ids, data, no_evaluation, c,
                    Logger(c.out_dir, c.max_iters, ("loss",)), dist)
    if resume:
        t.resume()
    return t


@pytest.mark.parametrize("settings", [
    {"lora_targets": ("embed_tokens", "q_proj"), "reference_mode": "periodic", "reference_update_freq": 1},
    {"lora_targets": "lm_head,q_proj"}], ids=str)
def test_a_resumed_run_of_an_adapter_equals_the_uninterrupted_one(llama, tmp_path, settings):
    uncut = adapted(llama, tmp_path / "uncut", max_iters=4, ppo_epochs=2, **settings)
    start = {name: p.detach().clone() for name, p in uncut.policy.model.net.named_parameters()}
    uncut.run()
    adapted(llama, tmp_path / "cut", max_iters=3, ppo_epochs=2, **settings).run()
    resumed = adapted(llama, tmp_path / "cut", max_iters=4, ppo_epochs=2, resume=True, **settings)
    assert resumed.buffer.queue, "it was cut within an iteration"
    resumed.run()
    there = dict(resumed.policy.model.net.named_parameters())
    for name, p in uncut.policy.model.net.named_parameters():  # the reference's adapter as well
        assert torch.equal(p, there[name]), name
        assert torch.equal(p, start[name]) == ("lora_" not in name), name
    assert all(r["grad_norm"] > 0 for r in training_records(tmp_path / "cut"))


def test_a_run_of_an_adapter_is_not_resumed_with_another_one_or_another_reference(llama, tmp_path):
    adapted(llama, tmp_path / "static", max_iters=1).run()
    adapted(llama, tmp_path / "moving", max_iters=1, reference_mode="periodic").run()
    other = "state.pt has a reference of other weights than reference_mode="
    for folder, settings, words in (
            ("static", {"reference_mode": "periodic"}, f"{other}'periodic'"), ("moving", {}, f"{other}'static'"),
            ("static", {"reference_checkpoint": llama[0]}, f"{other}'static'"),
            ("static", {"lora_alpha": 128.0}, "state.pt is of a run with lora_alpha=8.0, not 128.0"),
            ("static", {"lora_rank": 8}, "state.pt is of a run with lora_rank=4, not 8")):
        with pytest.raises(ValueError, match=words) as error:
            adapted(llama, tmp_path / folder, max_iters=2, resume=True, **settings)
        assert "\n" not in str(error.value) and "config.json" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_bandit_is_solved_in_several_steps_per_rollout(dataset, tmp_path, name):
    """The reward is the share of hidden places filled with 'e'; ratios leave 1 and are clipped on the way."""
    t = trainer(dataset, tmp_path, Calls(share_of_e), fill_policy(scale=1.0), objective=name, kl_beta=0.0, ppo_epochs=2,
                minibatches=2, max_iters=320, learning_rate=2e-2, min_lr=2e-2, batch_size=8, group_size=8,
                log_interval=1000, save_interval=1000)
    t.run()
    steps = training_records(tmp_path)
    assert steps[-1]["mean_reward"] > 0.9 and max(r.get("kl_to_old", 0.0) for r in steps) > 1e-3


def test_speed_counts_the_text_and_the_seconds_of_an_iteration(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=2, ppo_epochs=2)
    first, second = t.train_step(), t.train_step()
    spent = [sum(x for name, x in m.items() if name.startswith("time/")) for m in (first, second)]
    tokens = t.config.batch_size * t.config.group_size * t.config.block_size
    assert first["tokens_per_second"] == pytest.approx(tokens / spent[0])
    assert second["tokens_per_second"] == pytest.approx(tokens / sum(spent))
    assert t.spent == 0.0, "the next iteration begins anew"
