"""Several optimizer steps on the rollouts of an iteration: what runs once, in which order, what moves afterwards."""

import contextlib
import math

import numpy as np
import pytest
import torch

from core.optim import build_optimizers
from grpo.grpo_training_step import grpo_training_step
from grpo.reference import adapted, move_reference
from grpo.report import page
from grpo.rollout import DataBuffer, sums_of_old_state
from grpo.sums import Sums
from tests.tiny import (
    collect, config, consumer, count_rows, fill_policy, grpo_step, judge, one_process, prompt_config, rewards, same,
    sampled, step_problems, train, without_clock)
from tests.trainers import run, trainer, training_records


pytestmark = pytest.mark.usefixtures("without_pictures")


def test_minibatches_divide_the_problems_and_leave_groups_whole(dataset):
    rollouts, buffer = sampled(fill_policy(), dataset, config(batch_size=5)), DataBuffer()
    rollouts.advantage = torch.arange(20.0)[:, None]
    buffer.prepare_training_batch(buffer.store_rollout_data(rollouts, Sums()), 2, 3)
    seen = [buffer.next_minibatch()[0] for _ in range(6)]
    order = [part.advantage.view(-1, 4)[:, 0].div(4).long() for part in seen]  # the problems of each
    for part, problems in zip(seen, order, strict=True):
        rows = (4 * problems[:, None] + torch.arange(4)).flatten()
        assert torch.equal(part.advantage, rollouts.advantage[rows]) and torch.equal(part.target, rollouts.target[rows])
        assert torch.equal(part.inputs.texts, rollouts.inputs.texts[problems])
    for epoch in (order[:3], order[3:]):
        assert sorted(map(len, epoch)) == [1, 2, 2] and torch.cat(epoch).sort()[0].tolist() == [0, 1, 2, 3, 4]
    assert list(map(str, order[:3])) != list(map(str, order[3:])), "shuffled anew"
    assert buffer.rollouts is None and not buffer.queue
    assert buffer.get_buffer_statistics() == {"minibatches": 0, "stored": 1, "evaluations": 0}


def test_of_too_many_evaluations_the_first_the_last_and_some_between_are_kept():
    buffer, bound = DataBuffer(), 1000
    for step in range(5 * bound):
        buffer.store_evaluation_data(step, {"eval/x": step / 2})
        assert len(buffer.evaluations) <= bound
    steps = [record["step"] for record in buffer.evaluations]
    assert steps[0] == 0 and steps[-1] == 5 * bound - 1 and sorted(set(steps)) == steps
    assert len(steps) >= bound / 2
    assert all(record["eval/x"] == record["step"] / 2 for record in buffer.evaluations)
    other = DataBuffer()
    other.load_state_dict(buffer.state_dict() | {"rollouts": None})
    assert other.evaluations == buffer.evaluations


@pytest.mark.parametrize("ratio_to", ["policy", "sampler"])
def test_a_rollout_serves_all_its_epochs_and_everything_else_runs_once(dataset, tmp_path, ratio_to):
    t = trainer(dataset, tmp_path, max_iters=12, ppo_epochs=3, minibatches=2, ratio_to=ratio_to)
    read, reference_read = count_rows(t.policy.model), count_rows(t.reference.model)
    t.run()
    B, rescored = t.config.batch_size, ratio_to == "policy"
    assert t.iteration == 2 and sum(reference_read) == 2 * B, "once per problem and rollout, not per epoch"
    assert sum(read) == 2 * (B + rescored * B + 3 * B), "sampling, old log-probabilities, and one shared read per epoch"
    steps = training_records(tmp_path)
    assert steps[0]["kl_to_old"] == steps[6]["kl_to_old"] == 0, "the first step of an iteration has ratio 1"
    assert steps[5]["kl_to_old"] > steps[1]["kl_to_old"] > 0 and max(r["clip_fraction"] for r in steps) > 0
    assert ["mismatch_max" in r for r in steps] == [True, *[rescored] * 5] * 2, "never that of a policy that has moved"


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
    assert len(logged) == len(found) == 8
    for step, by_hand in enumerate(found):
        expected = by_hand | {"step": step + 1, "lr": c.learning_rate, "kl_beta": c.kl_beta}
        del expected["text_tokens"]  # the trainer logs tokens_per_second
        assert [logged[step]] == without_clock([expected])


def test_sums_of_earlier_states_are_read_by_what_their_names_began_with():
    pair = torch.tensor(2.0), 4
    saved = {"mean_reward": pair, "loss": (torch.tensor(2.0), None), "_ratio": (torch.tensor(2.0), None),
             "_mismatch_max": (torch.tensor(2.0), None), "logged by a reward: mine": pair, "mismatch_kl": pair,
             "skipped/judge": (torch.tensor(2.0), None), "varied in groups: judge": (torch.tensor(2.0), None),
             "varied in groups: ": (torch.tensor(2.0), None), "_taught": (torch.tensor(2.0), None)}
    found = sums_of_old_state(saved).values(one_process())
    assert found.metrics == {"mean_reward": 0.5, "loss": 2.0, "mismatch_max": 2.0, "mine": 0.5, "mismatch_kl": 0.5}
    assert found.varied == found.skipped == {"judge": 2.0}
    assert found.internal == {"ratio": 2.0, "tokens of the mismatch": 4.0, "groups that differ": 2.0,
                              "tokens with an advantage": 2.0}


@pytest.mark.slow
def test_steps_from_python_with_a_buffer_are_those_of_the_trainer(dataset, tmp_path):
    t = run(trainer(dataset, tmp_path, max_iters=8, ppo_epochs=2, minibatches=2))
    c, policy, buffer = t.config, fill_policy(seed=1, scale=3.0), DataBuffer(t.config.seed)
    reference, optimizers, scorer = policy.frozen(), build_optimizers(policy, c), rewards(c, judge())
    queued = []
    for step in range(8):
        problems = step_problems(consumer(dataset, c), c, step // 4)
        grpo_training_step(policy, reference, scorer, problems, optimizers, step // 4, c, one_process(), buffer)
        queued.append(len(buffer.queue))
    assert same(policy, t.policy) and queued == [3, 2, 1, 0] * 2


def test_a_step_without_a_buffer_is_the_one_step_on_its_rollouts_and_says_so(dataset):
    policies = []
    for settings in ({"ppo_epochs": 2, "minibatches": 2}, {}):
        c, policy = config(learning_rate=1e-2, **settings), fill_policy(seed=1, scale=3.0)
        said = pytest.warns(UserWarning, match="ppo_epochs") if settings else contextlib.nullcontext()
        with said:
            grpo_step(policy, policy.frozen(), rewards(c, judge()), consumer(dataset, c), c)
        policies.append(policy)
    assert same(*policies) and not same(policies[0], fill_policy(seed=1, scale=3.0))


def test_pages_of_a_long_run_take_a_time_that_is_linear_in_its_steps(dataset, tmp_path, monkeypatch):
    t = trainer(dataset, tmp_path, max_iters=40, eval_interval=1, sample_interval=100)
    pages = []  # the steps of which a page reads
    monkeypatch.setattr(page, "write_report", lambda folder, evaluated: pages.append(t.step))
    t.run()
    assert pages[:11] == list(range(11)) and 36 < pages[-1] and sum(pages) < 12 * 40


# The reference and kl_beta

def test_kl_beta_moves_towards_its_target_and_stays_within_a_hundredth_and_a_hundredfold():
    c = prompt_config(kl_beta=0.1, kl_target=0.01)
    assert adapted(0.1, 0.02, c) == pytest.approx(0.1 * 1.02) and adapted(0.1, 0.005, c) == pytest.approx(0.1 * 0.98)
    assert adapted(9.99, 1.0, c) == 10.0 and adapted(0.001001, 1e-5, c) == 0.001
    assert adapted(0.1, math.nan, c) == 0.1, "no KL was measured"


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


def test_a_periodic_reference_becomes_the_policy_when_its_time_comes():
    policy, reference = fill_policy(seed=1), fill_policy(seed=2).frozen()
    c = config(reference_mode="periodic", reference_update_freq=3)
    for iteration in (1, 2, 3):
        move_reference(reference, policy, iteration, c)
        assert same(reference, policy) == (iteration == 3)
