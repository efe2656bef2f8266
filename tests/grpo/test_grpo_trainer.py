"""Whole GRPO runs: what runs once per rollout, what moves after an iteration, interrupted runs and their states."""

import itertools
import json
import os
import signal

import numpy as np
import pytest
import torch

from core.models import load_model
from core.optim import build_optimizers
from grpo.report import page
from tests.grpo.trainers import (
    evaluated_trainer,
    logged_keys,
    prompt_trainer,
    records,
    run,
    trainer,
    training_records,
)
from tests.tiny import (
    collect,
    consumer,
    count_rows,
    fill_policy,
    judge,
    rewards,
    same,
    same_momentum,
    train,
    undocumented,
    without_clock,
)


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch):
    """Drawing the curves takes most of the time of a short run."""
    monkeypatch.setattr(page, "draw_curves", lambda runs, path: None)


def expect_whole(whole, resumed):
    """A resumed run has the weights, the momentum and the records of the uninterrupted one, to the last bit."""
    assert same(whole.policy, resumed.policy) and same_momentum(whole.optimizers, resumed.optimizers)
    assert whole.reference is None or same(whole.reference, resumed.reference)
    names = ("step", "kl_beta", "iteration", "before", "after", "empty_steps", "skipped_steps")
    assert all(getattr(whole, name) == getattr(resumed, name) for name in names)
    assert (whole.buffer.stored, whole.buffer.evaluations) == (resumed.buffer.stored, resumed.buffer.evaluations)
    one, two = (without_clock(records(t.config.out_dir)) for t in (whole, resumed))
    assert one == two


@pytest.mark.parametrize("ratio_to", ["policy", "sampler"])
def test_a_rollout_serves_all_its_epochs_and_everything_else_runs_once(dataset, tmp_path, ratio_to):
    t = trainer(dataset, tmp_path, max_iters=12, ppo_epochs=3, minibatches=2, ratio_to=ratio_to)
    read, reference_read = count_rows(t.policy.model), count_rows(t.reference.model)
    t.run()
    assert t.iteration == 2
    B = t.config.batch_size
    assert sum(reference_read) == 2 * B, "once per problem and rollout, not per epoch"
    rescored = ratio_to == "policy"
    assert sum(read) == 2 * (B + rescored * B + 3 * B), "sampling, old log-probabilities, and one shared read per epoch"
    steps = training_records(tmp_path)
    assert steps[0]["kl_to_old"] == steps[6]["kl_to_old"] == 0, "the first step of an iteration has ratio 1"
    assert steps[5]["kl_to_old"] > steps[1]["kl_to_old"] > 0 and max(r["clip_fraction"] for r in steps) > 0
    phases = [{name for name in r if name.startswith("time/")} for r in steps]
    names = "collect", "reference", "reward", "advantage", "train", *["rescore"] * rescored
    collected = {f"time/{name}" for name in names}
    assert phases == ([collected] + [{"time/train"}] * 5) * 2, "collecting takes time in its first step alone"
    assert ["mismatch_max" in r for r in steps] == [True, *[rescored] * 5] * 2


def test_steps_that_share_rollouts_are_those_taken_by_hand(dataset, tmp_path):
    t = run(trainer(dataset, tmp_path, max_iters=8, ppo_epochs=2, minibatches=2))
    c, policy, found = t.config, fill_policy(seed=1, scale=3.0), []
    reference, optimizers, data = policy.frozen(), build_optimizers(policy, c), consumer(dataset, c)
    for number in (0, 1):
        rollouts, sums = collect(policy, rewards(c, judge()), data, c, reference, number=number)
        halves = []
        for epoch in (0, 1):
            order = np.random.default_rng([3, c.seed, 0, number + 1, epoch]).permutation(4)
            halves += [sorted(order[:2]), sorted(order[2:])]
        for i, half in enumerate(halves):
            part, _ = rollouts.select(torch.tensor(half))
            if i == 0:
                part.proximal_logp = None
            found.append(train(policy, part, sums, c, optimizers))
    assert same(policy, t.policy)
    logged = without_clock(training_records(tmp_path))
    for step, by_hand in enumerate(found):
        expected = by_hand | {"step": step + 1, "lr": c.learning_rate, "kl_beta": c.kl_beta}
        del expected["bad_rollouts"], expected["text_tokens"]  # the second becomes tokens_per_second
        assert logged[step] == expected
    assert len(logged) == len(found) == 8


MOVING = [{"ppo_epochs": 2, "minibatches": 2}, {"reference_mode": "ema", "ema_alpha": 0.8, "kl_target": 1e-3},
          {"reference_mode": "periodic", "reference_update_freq": 2, "kl_in_reward": True},
          {"reference_mode": "none", "kl_beta": 0.0, "ppo_epochs": 3}]


@pytest.mark.parametrize("settings", MOVING, ids=lambda s: "-".join(map(str, s.values())))
def test_a_resumed_run_equals_the_uninterrupted_one(dataset, tmp_path, settings):
    settings = settings | {"lr_decay_iters": 8}
    whole = run(trainer(dataset, tmp_path / "whole", max_iters=8, **settings))
    cut = run(trainer(dataset, tmp_path / "cut", max_iters=5, **settings))
    assert cut.buffer.queue or "ppo_epochs" not in settings, "it was cut within an iteration"
    resumed = run(trainer(dataset, tmp_path / "cut", max_iters=8, resume=True, **settings))
    assert same(whole.policy, resumed.policy) and same_momentum(whole.optimizers, resumed.optimizers)
    assert whole.reference is None or same(whole.reference, resumed.reference)
    assert (whole.kl_beta, whole.iteration) == (resumed.kl_beta, resumed.iteration)


def test_a_resumed_causal_run_with_evaluations_equals_the_uninterrupted_one(prompts, tmp_path):
    settings = {"success_reward": "length_penalty", "overlong_buffer": 4}
    whole = run(prompt_trainer(prompts, tmp_path / "whole", max_iters=6, **settings))
    run(prompt_trainer(prompts, tmp_path / "cut", max_iters=3, **settings))
    expect_whole(whole, run(prompt_trainer(prompts, tmp_path / "cut", max_iters=6, **settings), resume=True))
    keys = logged_keys(tmp_path / "whole")
    assert {"completion_length", "truncated", "skipped_samples", "reward/length_penalty", "mean_kl", "entropy",
            "reward/overlong", "eval/greedy_accuracy", "eval/pass_at_k", "eval/kl", "eval/reward/length_penalty"} <= keys
    assert not undocumented(keys)


@pytest.mark.parametrize("place, step, evaluated", [("reward", 1, True), ("reward", 3, False), ("evaluation", 3, True),
                                                    ("evaluation", 6, True)])
def test_after_a_signal_the_run_is_saved_at_once_and_the_resumed_one_has_the_same_bits(dataset, tmp_path, capsys, place,
                                                                                     step, evaluated):
    """An evaluation that the signal came before is the resumed run's; who was at the last step has finished."""
    def signalling(t, name, function):
        def called(*arguments):
            if name == place and t.step == (step if name == "evaluation" else step - 1):
                os.kill(os.getpid(), signal.SIGTERM)
            return function(*arguments)
        return called

    settings = {"max_iters": 6, "ppo_epochs": 2, "reference_mode": "ema", "kl_target": 1e-3}
    whole = run(evaluated_trainer(dataset, tmp_path / "whole", **settings))
    cut = evaluated_trainer(dataset, tmp_path / "cut", **settings)
    cut.rewards, cut.evaluation = signalling(cut, "reward", cut.rewards), signalling(cut, "evaluation", cut.evaluation)
    cut.run()
    assert (cut.step, cut.evaluated) == (step, evaluated)
    stopped = f"stopped by SIGTERM after step {step}; go on with --resume=True" in capsys.readouterr().out
    assert stopped == bool(cut.stopped_by) == (step < 6)
    expect_whole(whole, run(evaluated_trainer(dataset, tmp_path / "cut", **settings), resume=True))


def test_max_iters_is_the_number_of_optimizer_steps_and_everything_is_written(dataset, tmp_path, capsys, monkeypatch):
    monkeypatch.undo()  # with the picture
    t = run(evaluated_trainer(dataset, tmp_path, max_iters=5))
    counts = {int(s["step"]) for o in t.optimizers for s in o.state_dict()["state"].values()}
    assert counts == {5}
    assert sorted(os.listdir(tmp_path)) == ["console.log", "curves.png", "metrics.jsonl", "model.safetensors",
                                            "report.html", "samples.jsonl", "state-before.pt", "state.pt"]
    final, facts = load_model(str(tmp_path / "model.safetensors"))
    assert same(final, t.policy) and facts["step"] == 5 and "eval/judge" in facts
    assert [r["step"] for r in training_records(tmp_path)] == [1, 2, 3, 4, 5]
    keys = logged_keys(tmp_path)
    assert {"loss", "kl_penalty", "mean_reward", "entropy", "clip_fraction", "grad_norm", "reward/judge",
            "tokens_per_second", "time/train", "skipped_steps"} <= keys
    assert not undocumented(keys) and undocumented(["loss2", "eval/x"])
    assert json.loads(open(tmp_path / "samples.jsonl").readline())["group"][0]["reward"] > 0
    shown = capsys.readouterr().out
    assert "held-out" in shown and "before" in shown and "change" in shown and "best" in shown


def test_ranks_meet_after_what_may_take_longer_than_an_exchange(dataset, tmp_path, monkeypatch):
    t, events = trainer(dataset, tmp_path, max_iters=2, eval_interval=1, save_interval=1), []
    works = (t, "run_evaluation"), (t.checkpoints, "save")
    for place, name in (*works, (t, "report"), *((t.dist, name) for name in ("barrier", "agree", "total", "gather"))):
        real = getattr(place, name)
        noted = lambda *given, name=name, real=real, **more: (real(*given, **more), events.append(name))[0]
        monkeypatch.setattr(place, name, noted)
    t.run()
    after = {a: b for a, b in itertools.pairwise(events) if b != "barrier" and a in ("run_evaluation", "save")}
    assert not after and events.count("report") == events.count("run_evaluation") == 3 and "save" in events, events


def test_reference_and_kl_beta_move_once_after_each_iteration(dataset, tmp_path):
    t = trainer(dataset, tmp_path, max_iters=6, ppo_epochs=2, kl_beta=0.1, kl_target=1e-3, learning_rate=3e-2,
                reference_mode="ema", ema_alpha=0.75)
    reference, kl_beta, moved = [p.clone() for p in t.reference.parameters()], 0.1, 0
    for number in range(6):
        metrics = t.train_step()
        assert metrics["kl_beta"] == pytest.approx(kl_beta, rel=1e-12)
        if number % 2:  # the controller of arXiv 1909.08593 section 2.2
            reference = [0.75 * e + 0.25 * p for e, p in zip(reference, t.policy.parameters(), strict=True)]
            error = metrics["mean_kl"] / 1e-3 - 1
            kl_beta *= 1 + 0.1 * min(0.2, max(-0.2, error))
            moved += metrics["mean_kl"] > 0
        for p, e in zip(t.reference.parameters(), reference, strict=True):
            torch.testing.assert_close(p, e)
    assert moved == 3 and t.kl_beta == pytest.approx(kl_beta, rel=1e-12) and t.kl_beta != 0.1


@pytest.mark.parametrize("change, words", [
    (lambda state: state["identity"].update(kind="CausalPolicy"), "differs in kind"),
    (lambda state: state["buffers"].append({}), "2 ranks"),
    (lambda state: state["identity"].pop("reference"), "differs in reference")])
def test_a_state_of_another_run_is_refused_in_one_line(dataset, tmp_path, change, words):
    settings = {"ppo_epochs": 2, "save_interval": 1}
    run(trainer(dataset, tmp_path, max_iters=1, **settings))
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(ValueError, match=f"state.pt .*{words}") as error:
        trainer(dataset, tmp_path, max_iters=2, resume=True, **settings)
    assert "\n" not in str(error.value)
