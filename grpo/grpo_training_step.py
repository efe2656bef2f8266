"""The algorithm: one GRPO optimizer step, and its phases: collect, reward, advantage, train."""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.distributed import Distributed
from core.settings.setting import Settings
from grpo.losses import (
    Objective, baseline_of, compute_advantages, kl_penalty, kl_per_token, objective_of, policy_loss, token_weights)
from grpo.metrics import VARIED, add_up, end_step, logged_sums, mismatch, rollout_sums, varied_sums
from grpo.reference import choose_estimator, penalty_weight, with_proximal, with_reference
from grpo.rollout import Rollouts, Scored, Scores

if TYPE_CHECKING:
    from grpo.policies.policy import Policy

# What a step does with rewards beyond the algorithm, in this order:
# {setting, and function of grpo/shaping.py: its value without it}
SHAPES = {
    "train_pass_k": 1,
    "overlong_buffer": 0,
    "kl_in_reward": False,
    "mask_truncated": False,
}


class Timer:
    """{"time/<phase>": seconds}. A phase lasts from the end of the one before it to its own end."""

    def __init__(self):
        self.times = {}
        self.last = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.times[f"time/{phase}"] = self.times.get(f"time/{phase}", 0.0) + now - self.last
        self.last = now


def grpo_training_step(policy: "Policy", reference: "Policy | None", rewards: Callable, problems: Callable,
                       optimizers: list, iteration: int, config: Settings, dist: Distributed) -> dict:
    """One optimizer step of GRPO (arXiv 2402.03300) on rollouts of its own, for callers from Python. The trainer calls
    the phases itself, because several steps may share rollouts.

    policy, reference (or None): policies; rewards: a Rewards, or any function rollouts -> Scored
    problems: again -> this rank's problems; 0 for the iteration's own, 1, 2, ... for others that replace groups of
        equal rewards
    iteration: number of the round of rollouts; the sampling noise depends on it
    Returns the metrics of docs/metrics.md as floats, and what a trainer needs besides (`end_step`, VARIED)
    """
    timer = Timer()
    sample = sampler_of(policy, problems, iteration, config)
    with dist.gathered():
        rollouts, sums, _ = collect_rollouts(policy, reference, rewards, sample, config, dist, timer)
    metrics = train_on_rollouts(policy, rollouts, sums, optimizers, config, dist)
    timer.end("train")
    return metrics | timer.times


def sampler_of(policy: "Policy", problems: Callable, iteration: int, config: Settings) -> Callable:
    """The function `sample` of collect_rollouts for a policy that samples by itself; problems: again -> problems."""
    def sample(again, count=None):
        return policy.sample({key: x[:count] for key, x in problems(again).items()}, iteration, config), {}
    return sample


def collect_rollouts(policy: "Policy", reference: "Policy | None", rewards: Callable, sample: Callable,
                     config: Settings, dist: Distributed, timer: Timer) -> tuple:
    """Phases 1 to 3 for this rank's share of an iteration.

    sample: (again, count) -> (Rollouts, sums of metrics) of the iteration's own problems (again=0), or of the first
        `count` of other problems (again=1, 2, ...)
    Returns the rollouts to train on, with their advantage; {metric: (sum, count)} as in grpo/metrics.py; and the first
    round as it was sampled: (Rollouts with texts, Scored)
    """
    sums, objective = {}, objective_of(config)

    def collect(again, count=None):
        """Phases 1 and 2 of one round: rollouts and their Scored."""
        rollouts, more = sample(again, count)
        timer.end("collect")
        rollouts = with_reference(rollouts, reference, choose_estimator(config, policy), config)
        timer.end("reference")
        scored = rewards(rollouts)
        if objective.advantage != "step":  # that one compares groups, too
            add_up(sums, varied_sums(scored))
        for shape in shapes_of(config):
            rollouts, scored = shape(rollouts, scored, rewards, config)
        add_up(sums, more | {VARIED: (scored.differ().sum(), None)})
        timer.end("reward")
        return rollouts, scored

    first = rollouts, scored = collect(0)
    sums |= rollout_sums(rollouts, scored, scored.differ(), objective.discriminative) | logged_sums(scored, dist)
    if config.zero_std != "keep":
        from grpo.shaping import zero_std
        rollouts, scored, more = zero_std(rollouts, scored, collect, config, dist)
        sums |= more
    rollouts = with_advantage(rollouts, scored, objective.advantage, dist)
    sums["_taught"] = ((rollouts.advantage != 0) * rollouts.train_mask).sum(), None
    sums["mean_advantage"] = (rollouts.advantage * rollouts.train_mask).sum(), rollouts.train_mask.sum()
    timer.end("advantage")
    rollouts, mismatches = with_proximal(rollouts, policy, config, timer)
    return replace(rollouts, texts=None), sums | mismatches, first


def shapes_of(config: Settings) -> list[Callable]:
    """The functions of grpo/shaping.py that the advantage and the settings ask for."""
    names = ["gdpo"] if baseline_of(config) == "gdpo" else []
    names += [key for key, value in SHAPES.items() if getattr(config, key) != value]
    return [getattr(import_module("grpo.shaping"), name) for name in names]


def with_advantage(rollouts: Rollouts, scored: Scored, advantage: str, dist: Distributed) -> Rollouts:
    """Phase 3: the rollouts with their advantage, and a train_mask without the completions that no reward scored.
    advantage: a name in ADVANTAGES"""
    counted = scored.counted(rollouts.mask)                                          # (P, G, 1 or M)
    credit = torch.where(counted > 0, scored.credit + scored.penalty, 0.0)           # (P, G, 1 or M)
    A = compute_advantages(credit, advantage, counted, dist.total) * scored.weight   # (P, G, 1 or M)
    seen = (~scored.reward.isnan()).float().view(-1, 1)                              # (N, 1)
    return replace(rollouts, train_mask=rollouts.train_mask * seen, advantage=A.flatten(0, 1))


def train_on_rollouts(policy: "Policy", rollouts: Rollouts, sums: dict, optimizers: list, config: Settings,
                      dist: Distributed) -> dict:
    """Phase 4: one optimizer step on this rank's share. Returns the metrics as floats. sums: those of collect_rollouts

    The backward pass runs in micro-batches. The weights are those of the whole step over all ranks, so that neither the
    cut nor the number of ranks changes the gradient.
    """
    objective, beta = objective_of(config), penalty_weight(config)
    weight = token_weights(rollouts.train_mask, objective.average, rollouts.max_tokens, dist.total)
    problems, learned = needed_problems(rollouts, objective, beta)
    trained = sums_of_nothing(rollouts, objective, beta)
    for part in dist.micro_batches(rollouts.micro_batches(config, problems), policy, rollouts):
        micro, rows = rollouts.select(part)
        scores = policy.score(micro, config.temperature, objective.entropy_bonus > 0)
        loss, more = rollout_loss(scores, micro, weight[rows], objective, beta)
        dist.backward(loss)
        add_up(trained, more)
    trained["_loss_tokens"] = learned.sum(), None
    return end_step(policy, optimizers, trained | sums, config, dist)  # the mismatch is that before the first step


def needed_problems(rollouts: Rollouts, objective: Objective, beta: float) -> tuple:
    """The problems that the loss or its metrics must read, as indices, and (N, M) 1.0 where a token has a gradient.

    Without entropy bonus and KL in the loss, advantages of 0 give no gradient. With a reference the KL of all problems
    is measured, so all are read.
    """
    problems = torch.arange(rollouts.problems)
    learned = rollouts.train_mask                                                    # (N, M)
    if objective.entropy_bonus == 0 and (beta == 0 or not rollouts.has_reference):
        learned = learned * (rollouts.advantage != 0)
        if not rollouts.has_reference:
            useful = rollouts.by_problem(learned.any(1)).any(1)                      # (P,)
            problems = problems[useful.cpu()]
    return problems, learned


def sums_of_nothing(rollouts: Rollouts, objective: Objective, beta: float) -> dict:
    """The sums of rollout_loss before the first micro-batch: all ranks have the same, though one may train on none."""
    nothing, _ = rollouts.select(torch.arange(0))
    x = nothing.old_logp                                                             # (0, M)
    scores = Scores(x, x, x if "reference" in nothing.inputs else None)
    return rollout_loss(scores, nothing, x, objective, beta)[1]


def rollout_loss(scores: Scores, rollouts: Rollouts, weight: Tensor, objective: Objective, beta: float) -> tuple:
    """Loss of a micro-batch of rollouts, and {metric: (sum, count)}, so that both add up over micro-batches and ranks.

    scores: of the policy; rollouts: with their advantage; weight: (N, M) from token_weights over the whole step
    objective: of objective_of; beta: the weight of the KL penalty
    """
    counted = rollouts.train_mask                                                    # (N, M)
    tokens = counted.sum()
    proximal = scores.logp.detach() if rollouts.proximal_logp is None else rollouts.proximal_logp
    loss, ratio, changed = policy_loss(scores.logp, proximal, rollouts.advantage, weight, objective)
    sums = mismatch(scores.logp, rollouts) | {name: (x, tokens) for name, x in changed.items()}
    sums["pg_loss"] = loss.detach(), None
    sums["entropy"] = (scores.entropy.detach() * counted).sum(), tokens
    kl = kl_per_token(scores, rollouts, objective.kl_estimator, ratio)
    if kl is not None:
        penalty = kl_penalty(kl, weight, beta)
        loss = loss + penalty
        sums["mean_kl"] = (kl.detach() * counted).sum(), tokens
        sums["kl_penalty"] = penalty.detach(), None
    if objective.entropy_bonus > 0:
        loss = loss - objective.entropy_bonus * torch.where(weight > 0, scores.entropy * weight, 0.0).sum()
    sums["loss"] = loss.detach(), None
    return loss, sums
