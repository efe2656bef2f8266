"""What a worker does with the weights, the problems and the rewards it is given."""

from types import SimpleNamespace

import pytest
import torch

from grpo.rewards import Scored
from grpo.samplers.packed_weights import pack
from grpo.samplers.ray_worker import RayWorker, on_cpu
from grpo.scoring import score
from tests.tiny import causal_policy, prompt_config, prompt_consumer


@pytest.fixture
def world(prompts):
    """settings -> (worker, the trainer's policy, problems)."""
    def made(rewards=None, **settings):
        c, worker = prompt_config(**settings), RayWorker()
        worker.build(lambda config: (causal_policy(seed=9), rewards), c)
        return worker, causal_policy(), prompt_consumer(prompts, c).problems("train", 0)
    return made


def test_a_worker_writes_with_the_weights_it_is_given_and_says_their_version(world):
    worker, policy, problems = world()
    written, version, scored = worker.write(problems, 3, 7, pack(policy.weights()))
    expected = policy.write(problems, 3, worker.config)
    assert torch.equal(written.target, expected.target) and torch.equal(written.logp, expected.logp)
    assert (version, scored) == (7, None)


def test_weights_are_copied_once_for_each_version(world, monkeypatch):
    worker, policy, problems = world()
    copied, load = [], worker.policy.load_weights
    monkeypatch.setattr(worker.policy, "load_weights", lambda weights: (copied.append(worker.version), load(weights)))
    for version in (0, 0, 1, 1, 0):
        worker.write(problems, 0, version, pack(policy.weights()))
    assert copied == [None, None, None], "while they are copied, the worker has no version"


def test_known_completions_are_scored_at_temperature_one(world):
    worker, policy, problems = world(temperature=0.6)
    written = policy.write(problems, 0, worker.config)
    found = worker.score(problems, written, 0, pack(policy.weights()))
    rollouts = policy.rollouts(problems, written, worker.config)
    torch.testing.assert_close(found, score(policy, rollouts, 1.0).logp.detach())
    assert not torch.allclose(found * written.mask, written.logp, atol=1e-2)


def test_rewards_in_a_worker_see_the_texts_and_the_step(world):
    class Watching:
        state = SimpleNamespace(global_step=0)

        def __call__(self, rollouts):
            self.seen = list(rollouts.texts.completions)
            return Scored(torch.full((rollouts.problems, rollouts.group_size), float(self.state.global_step)))

    rewards = Watching()
    worker, policy, problems = world(rewards, ppo_epochs=2, minibatches=2)
    _, _, scored = worker.write(problems, 5, 0, pack(policy.weights()))
    assert scored.reward.shape == (4, 4) and (scored.reward == 20.0).all(), "5 iterations of 4 steps"
    assert rewards.seen == policy.sample(problems, 5, worker.config).texts.completions


def test_scores_arrive_with_all_their_parts():
    scored = Scored(torch.rand(2, 3), torch.rand(2, 3, 4), {"a": torch.rand(6)}, metrics={"m": (1.0, 2)})
    back = on_cpu(scored)
    assert torch.equal(back.credit, scored.credit) and torch.equal(back.values["a"], scored.values["a"])
    assert back.metrics == {"m": (1.0, 2)}
