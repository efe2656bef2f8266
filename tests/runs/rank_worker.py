"""Run by test_ranks.py, alone or on two ranks: the gradient of a step for every objective, KL estimator and advantage,
and evaluations.

python tests/runs/rank_worker.py DATASET PROMPTS OUT LAYOUT...
A layout is BATCH_SIZExACCUMULATION, as 4x2. Writes <OUT>-<layout>-<rank>.pt for each,
and <OUT>-held-out-<rank>.pt.
"""

import dataclasses
import os
import sys
from types import SimpleNamespace

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))

import torch

from core.distributed import Distributed
from core.logger import create_logger
from core.supervised.build import build_batches, build_data
from core.supervised.config import PretrainConfig
from core.supervised.judge_training import judge_report
from grpo.build import FILL_IN, Models, fill_in_evaluation, make_rewards
from grpo.evaluation.prompts import PromptEvaluation
from grpo.grpo_trainer import GRPOTrainer
from grpo.losses import ADVANTAGES, OBJECTIVES
from grpo.reward_functions.judge import Judge
from grpo.rewards import Rewards, Scored, reward
from tests.tiny import (
    TOKENIZER, Catcher, causal_policy, collect, config, consumer, fill_policy, grpo_step, judge, length_reward, model,
    prompt_consumer, rewards, train)
from tests.trainers import RARELY, no_evaluation

KL = [{"kl_estimator": "exact"}, {"kl_beta": 0.0}, {"kl_estimator": "k2"}, {"kl_estimator": "k3"},
      {"kl_in_reward": True}, {"entropy_bonus": 0.1}]
TAUGHT = {"teacher_checkpoint": "passed as the reference", "kl_beta": 0.0, "group_size": 1}
PASSES = [{"unmask_steps": 3, "fill_estimator": name} for name in ("trajectory", "one_step")]
CASES = [
    *(("prompts", {"objective": name} | KL[i % len(KL)]) for i, name in enumerate(OBJECTIVES)),
    *(("prompts", {"advantage": name}) for name in ADVANTAGES), *(("prompts", kl) for kl in [*KL, TAUGHT]),
    *(("fill", {"objective": name, "credit_window": 3}) for name in OBJECTIVES), *(("fill", more) for more in PASSES)]
METRICS = ("loss", "pg_loss", "kl_penalty", "mean_kl", "entropy", "mean_reward", "std_reward", "unique_completions",
           "grad_norm", "mismatch_max", "mismatch_kl", "effective_sample_size", "clip_fraction", "kl_to_old")


def later_gradient(kind, cut, settings, scorer=None):
    """Collects rollouts and moves the policy, the same way on every rank. The gradient and metrics of its step on them.
    Sampler and scorer differ by more the larger the number of the problem is: by most on one rank."""
    c = config(**{"ppo_epochs": 2, "max_new_tokens": 6} | cut | settings)
    build, data = causal_policy, prompt_consumer(prompts, c, rank=dist.rank, world=dist.world)
    scorer = scorer or length_reward
    if kind == "fill":
        build, data = fill_policy, consumer(dataset, c, rank=dist.rank, world=dist.world)
        scorer = rewards(c, judge())
    policy, reference = build(seed=1, scale=3.0), build(seed=9).frozen() if kl_of(c) else None
    sample = policy.sample

    def sample_with_errors(problems, iteration, config):
        rollouts = sample(problems, iteration, config)
        off = 1e-3 * (1 + torch.as_tensor(problems["number"])).repeat_interleave(config.group_size)[:, None]
        return dataclasses.replace(rollouts, old_logp=rollouts.old_logp - off * rollouts.mask)

    policy.sample = sample_with_errors
    rollouts, sums = collect(policy, scorer, data, c, reference, dist)
    torch.manual_seed(7)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * p.abs().mean() * torch.randn_like(p))
    catcher = Catcher(policy)
    metrics = train(policy, rollouts, sums, c, [catcher], dist)
    return {"gradient": catcher.gradient, "metrics": torch.tensor([metrics.get(name, 0.0) for name in METRICS])}


def kl_of(c):
    return c.kl_beta or c.teacher_checkpoint


def on_rank_1(value):
    """A rewards object: the length, but of the first problem the value on rank 1, 0 elsewhere."""
    def scorer(rollouts):
        reward = length_reward(rollouts).reward
        reward[0] = value * (dist.rank == 1)
        return Scored(reward)
    return scorer


def one_group(rollouts):
    """A rewards object: rewards differ on rank 1 alone."""
    return Scored(length_reward(rollouts).reward * (dist.rank == 1))


def bad_steps(out_dir):
    """A gradient, and the rewards of the second of three iterations, that are not finite on rank 1 alone."""
    cut = {"batch_size": 2, "kl_beta": 0.0}
    c = config(**cut)
    data, policy = consumer(dataset, c, rank=dist.rank, world=dist.world), fill_policy()
    before = policy.frozen()
    bad = torch.nan if dist.rank == 1 else 1.0
    next(policy.model.parameters()).register_hook(lambda gradient: gradient * bad)
    scorer = rewards(c, judge())
    skipped = grpo_step(policy, None, scorer, data, c, dist=dist)["skipped_steps"]
    stayed = all(map(torch.equal, policy.weights().values(), before.weights().values()))

    class OnceBad:
        state = SimpleNamespace(global_step=0)

        def __call__(self, rollouts):
            scored = scorer(rollouts)
            if self.state.global_step == 2 and dist.rank == 1:
                scored.reward[0, 0] = torch.inf
            return Scored(scored.reward)

    c = config(max_iters=6, minibatches=2, out_dir=out_dir, save_interval=1, **cut, **RARELY)
    trainer = GRPOTrainer(fill_policy(seed=dist.rank), None, OnceBad(), data, no_evaluation, c,
                          create_logger(c, dist, 6, ("loss",)), dist)
    trainer.run()
    return {"gradient": (skipped, stayed), "weights": trainer.policy.weights(),
            "run": (trainer.skipped_steps, trainer.step, trainer.iteration)}


def held_out(kind, settings):
    """What an evaluation finds, and the completions for which it calls a reward on this rank."""
    called = []

    @reward(0, 1)
    def noted(prompts, completions, **columns):
        called.extend(map(str.__add__, prompts, completions))
        return [None if "e" in text[:2] else float(text < "M") for text in completions]

    c = config(**{"dataset": dataset, "eval_completions": 2, "max_new_tokens": 6, "task_type": "general",
                  "reward_functions": ("noted",)} | settings)
    if kind == "fill":
        policy = fill_policy(seed=1, scale=3.0)
        judges = [Judge(judge(seed), TOKENIZER, reads_ids=True) for seed in (5, 6)]
        models = Models(FILL_IN, policy, fill_policy(seed=9).frozen(), *judges)
        evaluation = fill_in_evaluation(c, models, dist, make_rewards(c, models.judge))
    else:
        policy, reference = causal_policy(seed=1, scale=3.0), causal_policy(seed=9).frozen()
        evaluation = PromptEvaluation(prompt_consumer(prompts, c), reference, Rewards(c), c, dist)
    metrics, samples = evaluation(policy, 0.9)
    return {"metrics": metrics, "samples": samples, "called": called}


def supervised():
    """What the evaluations of supervised runs find, of three batches."""
    c = PretrainConfig(dataset=dataset, mode="masked_fill", block_size=32, batch_size=4, eval_batches=3, device="cpu")
    data = build_data(c, dist)
    _, evaluation = build_batches(c, data, dist)
    return evaluation(model()), judge_report(judge(), data, model(seed=3), dist, 3)


HELD_OUT = {"fill, 3 batches": ("fill", {"eval_problems": 40}), "fill, 1 batch": ("fill", {"eval_problems": 5}),
            "prompts, 3 batches": ("prompts", {"eval_problems": 6, "sample_rows": 2}),
            "prompts, 1 batch": ("prompts", {"eval_problems": 5, "sample_rows": 5})}
dataset, prompts, out, *layouts = sys.argv[1:]
dist = Distributed("cpu", "float32")
for name in layouts:
    batch_size, accumulation = map(int, name.split("x"))
    cut = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    torch.save([later_gradient(kind, cut, settings) for kind, settings in CASES], f"{out}-{name}-{dist.rank}.pt")
found = {name: held_out(*case) for name, case in HELD_OUT.items()}
torch.save(found | {"supervised": supervised()}, f"{out}-held-out-{dist.rank}.pt")
if dist.world > 1:
    one = {"batch_size": 4, "kl_beta": 0.0}
    alone = [later_gradient("prompts", one, {"zero_std": "resample"}, on_rank_1(1.0)),
             later_gradient("prompts", one, {"zero_std": "drop"}, one_group)]
    torch.save({"alone": alone, "bad": bad_steps(f"{out}-run")}, f"{out}-of-{dist.rank}.pt")
dist.close()
