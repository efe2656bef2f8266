"""Several optimizer steps on the rollouts of an iteration: what runs once, in which order, what moves afterwards."""

import dataclasses

import numpy as np
import pytest
import torch

from core.optim import build_optimizers
from grpo.reference import ADAPT_RANGE, adapted, ema, periodic
from grpo.rollout import DataBuffer
from tests.tiny import (
    collect, config, consumer, count_rows, fill_policy, judge, rewards, same, sampled, train, without_clock)
from tests.trainers import run, trainer, training_records


pytestmark = pytest.mark.usefixtures("without_pictures")


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
    phases = [{name.removeprefix("time/") for name in r if name.startswith("time/")} for r in steps]
    names = {"collect", "reference", "reward", "advantage", "train", *["rescore"] * rescored}
    assert phases == [names, *[{"train"}] * 5] * 2, "collecting takes time in its first step alone"
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
        del expected["bad_rollouts"], expected["text_tokens"]  # the second becomes tokens_per_second
        assert logged[step] == expected


def test_minibatches_divide_the_problems_and_leave_groups_whole(dataset):
    rollouts = sampled(fill_policy(), dataset, config(batch_size=5))
    rollouts, buffer = dataclasses.replace(rollouts, advantage=torch.randn(20, 1)), DataBuffer()
    buffer.prepare_training_batch(buffer.store_rollout_data(rollouts, {}), 2, 3)
    seen = [part for part, _ in buffer]

    def texts(r):
        return r.inputs["texts"].flatten(1)

    for epoch in (seen[:3], seen[3:]):
        assert sorted(r.problems for r in epoch) == [1, 2, 2]
        for read in (texts, lambda r: r.target, lambda r: r.advantage):
            rows = sorted(map(tuple, torch.cat([read(r) for r in epoch]).tolist()))
            assert rows == sorted(map(tuple, read(rollouts).tolist()))
    for part in seen:
        for i, text in enumerate(texts(part).tolist()):
            number = texts(rollouts).tolist().index(text)
            assert torch.equal(part.target[4 * i : 4 * i + 4], rollouts.target[4 * number : 4 * number + 4])
    assert [texts(r).tolist() for r in seen[:3]] != [texts(r).tolist() for r in seen[3:]], "shuffled anew"
    assert buffer.rollouts is None and not buffer.queue


# The reference and kl_beta

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


@pytest.mark.parametrize("kl_beta, mean_kl, moved", [
    (0.1, 0.5, 0.1), (0.1, 0.55, 0.1 * 1.01), (0.1, 50.0, 0.1 * 1.02), (0.1, 1e-9, 0.1 * 0.98), (0.1, 0.0, 0.1),
    (0.1, np.nan, 0.1), (0.1 * ADAPT_RANGE, 50.0, 0.1 * ADAPT_RANGE), (0.1 / ADAPT_RANGE, 1e-9, 0.1 / ADAPT_RANGE)])
def test_kl_beta_moves_by_a_tenth_of_at_most_a_fifth_and_is_clamped(kl_beta, mean_kl, moved):
    assert adapted(kl_beta, mean_kl, config(kl_beta=0.1, kl_target=0.5)) == pytest.approx(moved, rel=1e-12)
    assert adapted(kl_beta, mean_kl, config(kl_beta=0.1)) == kl_beta, "without a target it stays"


def test_an_ema_reference_follows_once_where_input_and_output_share_a_matrix():
    policy = fill_policy(tied=True)
    reference, before = policy.frozen(), policy.frozen().weights()
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(1.0)
    ema(reference, policy, 1, config(reference_mode="ema", ema_alpha=0.9))
    for name, x in reference.weights().items():
        torch.testing.assert_close(x, before[name] + 0.1, rtol=1e-4, atol=1e-5)


def test_a_periodic_reference_becomes_the_policy_when_its_time_comes():
    policy, reference, before = fill_policy(seed=1), fill_policy(seed=2).frozen(), fill_policy(seed=2)
    c = config(reference_mode="periodic", reference_update_freq=3)
    for iteration in (1, 2):
        periodic(reference, policy, iteration, c)
        assert same(reference, before)
    periodic(reference, policy, 3, c)
    assert same(reference, policy) and not any(p.requires_grad for p in reference.parameters())
