"""Workers share the problems, and what they write does not depend on their number, deaths or delays.

Here Ray is a stand-in that runs in this process, so that a test decides who dies when (fake_ray.py). Real workers are
in test_build.py.
"""

import pytest
import torch

from grpo.rewards import Scored
from grpo.samplers import ray as module
from grpo.samplers.ray import MOST_TRIES, RaySampler, joined_scores
from grpo.samplers.sampler import SamplerError
from tests.grpo.samplers.fake_ray import FakeRay
from tests.tiny import (causal_policy, config, consumer, fill_policy, length_reward, one_process, prompt_config,
                        prompt_consumer)


@pytest.fixture
def causal(monkeypatch, prompts):
    """plans, settings -> (RaySampler of two workers, FakeRay, policy, problems of an iteration)."""
    def made(*plans, reward=None, **settings):
        fake, policy = FakeRay(plans), causal_policy()
        monkeypatch.setattr(module, "joined_ray", lambda *_: (fake, fake.leave))
        c = prompt_config(sampler="ray", **{"ray_workers": 2} | settings)
        sampler = RaySampler(lambda config: (causal_policy(seed=9), reward), policy, c, one_process())
        sampler.sync(policy.weights(), 0)
        return sampler, fake, policy, lambda i: prompt_consumer(prompts, c).problems("train", i)
    return made


def expect_same(found, policy, problems, iteration, c, tolerance=1e-5):
    expected = policy.sample(problems, iteration, c)
    assert torch.equal(found.rollouts.target, expected.target) and torch.equal(found.rollouts.mask, expected.mask)
    torch.testing.assert_close(found.rollouts.old_logp, expected.old_logp, rtol=0, atol=tolerance)
    assert found.rollouts.texts.completions == expected.texts.completions
    assert torch.equal(found.rollouts.reading.chosen, expected.reading.chosen)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])  # with 7 there are more workers than problems
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8, "top_k": 9}])
def test_workers_write_what_the_policy_writes(causal, workers, truncation):
    sampler, _, policy, problems = causal(ray_workers=workers, **truncation)
    sampler.start(problems(0), 0, 0)
    found = sampler.finish()
    expect_same(found, policy, problems(0), 0, sampler.config)
    assert (found.rollouts.reading.kept is None) == (not truncation)
    assert (found.version, found.sums) == (0, {"sampler/replaced_workers": 0.0})


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"unmask_steps": 3}, {"unmask_steps": 3, "top_p": 0.8},
                                      {"unmask_steps": 3, "fill_estimator": "coupled"},
                                      {"fill_estimator": "prompt_mask"}], ids=str)
def test_workers_fill_in_what_the_policy_fills_in(monkeypatch, dataset, settings):
    fake, policy = FakeRay(), fill_policy()
    monkeypatch.setattr(module, "joined_ray", lambda *_: (fake, fake.leave))
    c = config(sampler="ray", ray_workers=3, **settings)
    problems = consumer(dataset, c).problems("train", 0)
    sampler = RaySampler(lambda config: (fill_policy(seed=9), None), policy, c, one_process())
    sampler.sync(policy.weights(), 0)
    sampler.start(problems, 0, 0)
    found, expected = sampler.finish().rollouts, policy.sample(problems, 0, c)
    hidden = expected.mask > 0
    assert torch.equal(found.target[hidden], expected.target[hidden]) and torch.equal(found.mask, expected.mask)
    torch.testing.assert_close(found.old_logp[hidden], expected.old_logp[hidden], rtol=0, atol=1e-5)
    assert found.texts.completions == expected.texts.completions
    for name in ("texts", "position", "places"):
        assert torch.equal(getattr(found.reading, name), getattr(expected.reading, name)), name
    if expected.reading.kept is not None:
        assert torch.equal(found.reading.kept.ids, expected.reading.kept.ids)


def test_a_start_is_written_with_the_weights_of_its_version(causal):
    sampler, fake, policy, problems = causal(max_staleness=1)
    sampler.start(problems(0), 0, 0)
    sampler.start(problems(1), 1, 0)
    before = causal_policy()
    with torch.no_grad():
        for x in policy.parameters():
            x.mul_(1.2)
    sampler.sync(policy.weights(), 1)
    sampler.start(problems(2), 2, 1)
    for i, (writer, version) in enumerate(((before, 0), (before, 0), (policy, 1))):
        found = sampler.finish()
        assert found.version == version
        expect_same(found, writer, problems(i), i, sampler.config)
    assert len(fake.stored) == 2 and list(sampler.weights) == [0, 1]
    sampler.sync(policy.weights(), 2)
    assert list(sampler.weights) == [2], "weights that nobody needs stay in the object store"


@pytest.mark.parametrize("plans", [(["dies"],), (["hangs"],), (["ok", "dies"], ["dies"]), (["dies"], ["dies"]),
                                   (["dies"], ["ok"], ["dies", "dies"])], ids=str)
def test_a_lost_worker_is_replaced_and_nothing_is_lost(causal, plans):
    sampler, fake, policy, problems = causal(*plans)
    lost = 0
    for i in range(3):
        sampler.start(problems(i), i, 0)
        found = sampler.finish()
        expect_same(found, policy, problems(i), i, sampler.config)
        lost += found.sums["sampler/replaced_workers"]
    assert lost == sum(not set(plan) <= {"ok"} for plan in plans)
    assert len(sampler.workers) == 2 and all(worker.alive for worker in sampler.workers)
    assert len(fake.actors) == 2 + lost


def test_the_problems_of_a_lost_worker_go_to_another_one_at_once(causal):
    sampler, fake, _, problems = causal(["dies"])
    batch = problems(0)
    sampler.start(batch, 0, 0)
    sampler.finish()
    first, second = list(batch["number"][:2]), list(batch["number"][2:])
    assert fake.written == [(0, first, 0), (1, second, 0), (1, first, 0)]
    assert fake.killed == [0]


def test_what_a_lost_worker_was_to_write_later_is_written_too(causal):
    sampler, _, policy, problems = causal(["dies"], ray_workers=1, max_staleness=2)
    for i in range(3):
        sampler.start(problems(i), i, 0)
    for i in range(3):
        expect_same(sampler.finish(), policy, problems(i), i, sampler.config)


def test_a_late_worker_is_named_with_the_setting_if_all_are_late(causal):
    sampler, _, _, problems = causal(*[["hangs"] * 9] * 20, sampler_timeout=0.01)
    sampler.start(problems(0), 0, 0)
    with pytest.raises(SamplerError, match=f"{MOST_TRIES} workers were lost .* more than sampler_timeout=0.01 seconds"):
        sampler.finish()


def test_an_error_of_the_workers_code_ends_the_run_with_its_last_line(causal, monkeypatch):
    sampler, _, _, problems = causal()

    def broken(*_):
        raise ValueError("top_k=7 is not for this model")
    monkeypatch.setattr(module.RayWorker, "write", broken)
    sampler.start(problems(0), 0, 0)
    with pytest.raises(SamplerError, match="^a worker of sampler='ray' failed: ValueError: top_k=7 is not for this"):
        sampler.finish()


def test_workers_that_cannot_be_built_end_the_run_and_leave_nothing_open(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(module, "joined_ray", lambda *_: (fake, fake.leave))

    def make(config):
        raise ValueError("generator_checkpoint=x is no file")
    with pytest.raises(SamplerError, match="generator_checkpoint=x is no file"):
        RaySampler(make, causal_policy(), prompt_config(sampler="ray"), one_process())
    assert fake.left


def test_rewards_of_workers_are_those_of_the_whole_batch(causal):
    sampler, _, policy, problems = causal(reward=length_reward, ray_workers=3, ray_rewards=True)
    sampler.start(problems(0), 0, 0)
    found = sampler.finish()
    assert torch.equal(found.scored.reward, length_reward(policy.sample(problems(0), 0, sampler.config)).reward)


def test_joined_scores_keep_values_and_add_up_what_rewards_logged():
    parts = [Scored(torch.rand(P, 2), torch.rand(P, 2, M), {"judge": torch.rand(2 * P)}, metrics=metrics)
             for P, M, metrics in ((2, 3, {"seen": (1.0, 2)}), (1, 4, {"seen": (2.0, 1), "rare": (5.0, 1)}))]
    joined = joined_scores(parts, "cpu")
    assert joined.reward.shape == (3, 2) and joined.credit.shape == (3, 2, 4)
    assert torch.equal(joined.values["judge"], torch.cat([part.values["judge"] for part in parts]))
    assert joined.metrics == {"seen": (3.0, 3), "rare": (5.0, 1)}
    assert joined_scores([None, None], "cpu") is None


def test_known_completions_are_scored_by_every_worker_with_the_last_weights(causal):
    sampler, _, policy, problems = causal()
    written = policy.write(problems(4), 4, sampler.config)
    assert len(scores := sampler.score(problems(4), written)()) == 2
    for logp in scores:
        torch.testing.assert_close(logp * written.mask, written.logp, rtol=0, atol=1e-5)
    with torch.no_grad():
        for x in policy.parameters():
            x.mul_(1.2)
    sampler.sync(policy.weights(), 1)
    assert not torch.allclose(sampler.score(problems(4), written)()[0] * written.mask, written.logp, atol=1e-3)


def test_a_dead_worker_has_no_scores(causal):
    sampler, _, policy, problems = causal()
    sampler.workers[0].alive = False
    first, second = sampler.score(problems(0), policy.write(problems(0), 0, sampler.config))()
    assert first is None and second is not None


def test_closing_ends_the_workers_and_leaves_ray(causal):
    sampler, fake, _, _ = causal()
    sampler.close()
    assert fake.left and fake.asked == fake.killed == [0, 1] and not sampler.workers


def test_a_ray_that_is_gone_does_not_hide_why_the_run_ends(causal, monkeypatch):
    sampler, fake, _, _ = causal()

    def gone(worker):
        raise fake.exceptions.RayError("no cluster")

    monkeypatch.setattr(fake, "kill", gone)
    sampler.close()
    assert fake.left
