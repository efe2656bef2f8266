"""What a worker does with the weights and the problems that it is given."""

from types import SimpleNamespace

import torch

from grpo.samplers.ray_worker import RayWorker, pack
from grpo.scoring import score
from tests.tiny import causal_policy, prompt_config, prompt_consumer


def test_known_completions_are_scored_at_temperature_one_with_the_weights_that_come_with_them(prompts):
    c = prompt_config(temperature=0.6)
    worker, policy = RayWorker(lambda config: causal_policy(seed=9), c), causal_policy()
    problems = prompt_consumer(prompts, c).problems("train", 0)
    rollouts = policy.sample(problems, 0, c)
    found = worker.score(rollouts, 0, pack(policy.weights()))
    torch.testing.assert_close(found, score(policy, rollouts, 1.0).logp.detach())
    assert not torch.allclose(found * rollouts.mask, rollouts.old_logp, atol=1e-2)


def test_weights_of_every_kind_are_copied_to_the_last_bit_once_for_each_version():
    weights = {"matrix": torch.randn(3, 4).T, "half": torch.randn(5).bfloat16(), "scalar": torch.tensor(2.5),
               "flags": torch.tensor([True, False])}
    loaded = []
    mine = {name: torch.zeros_like(x) for name, x in weights.items()}
    worker = RayWorker(lambda config: SimpleNamespace(weights=lambda: mine, load_weights=loaded.append), None)
    for version in (0, 0, 1, 1, 0):
        worker.load(version, pack(weights))
    assert len(loaded) == 3
    for name, x in weights.items():
        assert loaded[0][name].dtype == x.dtype and torch.equal(loaded[0][name], x), name
