"""With max_staleness=k the completions of iteration i come from the weights of iteration i - k, to the last bit."""

import copy
from types import SimpleNamespace

import pytest

from core.logger import Logger
from core.optim import build_optimizers
from grpo.grpo_trainer import GRPOTrainer
from grpo.grpo_training_step import grpo_training_step
from grpo.rewards import Scored
from grpo.sampling_settings import SamplingSettings
from grpo.samplers.sampler import Prefetcher
from tests.tiny import (
    causal_policy, config, consumer, fill_policy, length_reward, one_process, prompt_config, prompt_consumer,
    prompt_fill_policy, read_records, same, step_problems, without_clock)


def mean_id(rollouts):
    """A rewards object in which completions hardly ever get equal rewards."""
    return Scored((rollouts.target * rollouts.mask).mean(1).view(rollouts.problems, -1))


KINDS = {"fill": (fill_policy, config, consumer, mean_id),
         "causal": (causal_policy, prompt_config, prompt_consumer, length_reward),
         "any order": (prompt_fill_policy, prompt_config, prompt_consumer, mean_id)}


@pytest.fixture
def world(dataset, prompts, tmp_path):
    """kind, settings -> (config, policy, data, reward)"""
    def made(kind, **settings):
        policy, configured, data_of, reward = KINDS[kind]
        c = configured(**{"out_dir": str(tmp_path / "out"), "kl_beta": 0.0, "eval_interval": 100,
                          "sample_interval": 100, "learning_rate": 1e-3, "min_lr": 1e-3} | settings)
        return c, policy(scale=3.0), data_of(dataset if kind == "fill" else prompts, c), reward
    return made


def trainer(c, policy, data, reward):
    return GRPOTrainer(policy, None, reward, data, lambda policy, temperature: ({}, []), c,
                       Logger(c.out_dir, c.max_iters, ("loss",)), one_process())


def by_hand(c, policy, data, reward, version_of, first=0, optimizers=None):
    """The steps of a run without a trainer. version_of: iteration -> the iteration whose weights sample its rollouts"""
    optimizers, copies = optimizers or build_optimizers(policy, c), {first: copy.deepcopy(policy)}
    for i in range(first, c.max_iters):
        sampler = copies[version_of(i)]
        grpo_training_step(policy, None, reward, step_problems(data, c, i), optimizers, i, c, one_process(),
                           sample=lambda problems, again: (sampler.sample(problems, i, SamplingSettings.of(c)), {}))
        copies[i + 1] = copy.deepcopy(policy)


def staleness(c):
    records = without_clock(read_records(f"{c.out_dir}/metrics.jsonl"))
    return [record.get("staleness") for record in records if "loss" in record]


@pytest.mark.parametrize("kind, k, settings", [
    ("causal", 0, {"zero_std": "resample"}), ("fill", 1, {}), ("causal", 2, {}),
    ("any order", 1, {"unmask_steps": 3, "max_new_tokens": 9}), ("fill", 1, {"ratio_to": "sampler"})])
def test_rollouts_are_sampled_by_the_weights_of_k_iterations_before_to_the_last_bit(world, kind, k, settings):
    c, policy, data, reward = world(kind, max_staleness=k, max_iters=4, **settings)
    twin = copy.deepcopy(policy)
    trainer(c, policy, data, reward).run()
    by_hand(c, twin, data, reward, lambda i: max(0, i - k))
    assert same(policy, twin)
    assert staleness(c) == [min(i, k) if k else None for i in range(4)]


def test_a_resumed_run_samples_again_what_was_in_flight_with_the_weights_it_has(world):
    c, policy, data, reward = world("causal", max_staleness=1, max_iters=2)
    trainer(c, policy, data, reward).run()
    c, again, *_ = world("causal", max_staleness=1, max_iters=5)
    t = trainer(c, again, data, reward)
    t.resume()
    twin = copy.deepcopy(again)
    optimizers = build_optimizers(twin, c)
    for mine, other in zip(optimizers, t.optimizers, strict=True):
        mine.load_state_dict(copy.deepcopy(other.state_dict()))
    t.run()
    by_hand(c, twin, data, reward, lambda i: max(2, i - 1), first=2, optimizers=optimizers)
    assert same(again, twin)
    assert staleness(c) == [0.0, 1.0, 0.0, 1.0, 1.0]


class HandSampler:
    """Samples nothing. `events` tells what was asked of it."""

    def __init__(self):
        self.events, self.queue = [], []

    def sync(self, weights, version):
        self.events.append(f"sync {version}")

    def start(self, problems, iteration):
        self.events.append(f"start {problems}")
        self.queue.append(SimpleNamespace(problems=4, name=problems))

    def finish(self):
        return self.queue.pop(0)


@pytest.mark.parametrize("k, asked, events", [
    (2, ["0", "1", "2"], "sync 0, start 0, start 1, start 2, sync 1, start 3, sync 2"),
    (1, ["0", "0+", "1"], "sync 0, start 0, start 1, start 0+, sync 1, start 2")])  # + replaces groups of equal rewards
def test_later_iterations_start_before_this_one_is_trained_and_none_beyond_the_last(k, asked, events):
    sampler = HandSampler()
    prefetcher = Prefetcher(sampler, SimpleNamespace(weights=dict), str, max_staleness=k)
    for problems in asked:
        rollouts, sums = prefetcher.get(problems, int(problems[0]), problems.count("+"), 3)
        age = min(int(problems[0]), k) if problems.isdigit() else 0
        assert rollouts.name == problems and sums == {"staleness": (4 * age, 4)}
    assert ", ".join(sampler.events) == events
