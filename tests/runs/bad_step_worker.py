"""Steps of two ranks, of which rank 1 alone has a number that is not finite. Called by rank_worker.py."""

from types import SimpleNamespace

import torch

from core.logger import create_logger
from grpo.grpo_trainer import GRPOTrainer
from grpo.rewards import Scored
from tests.trainers import RARELY, no_evaluation
from tests.tiny import config, consumer, fill_policy, grpo_step, judge, rewards


def bad_steps(dataset, out_dir, dist):
    """{case: {"moved", "weights", "skipped_steps"}} of this rank."""
    bad, result = torch.nan if dist.rank == 1 else 1.0, {}
    ranks = {"rank": dist.rank, "world": dist.world}

    def weights(policy):
        return torch.cat([p.flatten() for p in policy.parameters()]).detach().clone()

    def note(name, policy, before, metrics):
        result[name] = {"moved": not torch.equal(before, weights(policy)), "weights": weights(policy),
                        "skipped_steps": metrics["skipped_steps"]}

    def step(name, policy, scorer=None):
        c, before = config(batch_size=2, grad_clip=1.0, kl_beta=0.0), weights(policy)
        scorer = scorer or rewards(c, judge())
        note(name, policy, before, grpo_step(policy, None, scorer, consumer(dataset, c, **ranks), c, dist=dist))

    def with_bad_logits(policy, in_training):
        """Logits are not finite in training, or while sampling."""
        project = policy.model.project
        policy.model.project = lambda h: project(h) * (bad if torch.is_grad_enabled() == in_training else 1.0)
        return policy

    def reward_of(value):
        """A rewards object: random, but on rank 1 this value for the first completion."""
        def scored(rollouts):
            x = torch.rand(rollouts.problems, 4, generator=torch.Generator().manual_seed(dist.rank))
            x[0, 0] = value if dist.rank == 1 else x[0, 0]
            return Scored(x)
        return scored

    step("nothing", fill_policy(), reward_of(0.5))
    policy = fill_policy()
    next(policy.model.parameters()).register_hook(lambda gradient: gradient * bad)
    step("gradient", policy)
    step("loss", with_bad_logits(fill_policy(), in_training=True))
    step("sampler", with_bad_logits(fill_policy(), in_training=False))
    step("reward", fill_policy(), reward_of(-torch.inf))

    class OnceBad:
        state = SimpleNamespace(global_step=0)

        def __call__(self, rollouts):
            return reward_of(torch.inf if self.state.global_step == 2 else 0.5)(rollouts)

    # A whole run whose second of three iterations has a bad reward
    c = config(batch_size=2, max_iters=6, minibatches=2, kl_beta=0.0, out_dir=out_dir, save_interval=1, **RARELY)
    policy = fill_policy()
    trainer = GRPOTrainer(policy, None, OnceBad(), consumer(dataset, c, **ranks), no_evaluation, c,
                          create_logger(c, dist, 6, ("loss",)), dist)
    before = weights(policy)
    trainer.run()
    note("run", policy, before, {"skipped_steps": trainer.skipped_steps})
    result["run"] |= {"step": trainer.step, "iteration": trainer.iteration}
    return result
