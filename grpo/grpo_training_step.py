"""One GRPO optimizer step: sample groups, score, subtract baselines, backward, apply."""

import time

import torch

from core.losses import entropy, exact_kl, sampling_logp
from core.training_step import apply_gradients
from grpo.advantages import compute_advantages
from grpo.objectives import OBJECTIVES, policy_loss, token_weights
from grpo.rewards import compute_rewards
from grpo.rollout import collect


def rollout_loss(policy, rollouts, advantage, weight, config):
    """Loss of some rollouts of a step, and metrics as sums, so that both add up over micro-batches and ranks.

    advantage: (N, 1) or (N, M); weight: (N, M) from token_weights over the whole step
    Logits are computed once per distinct input and chosen position, so KL and entropy are exact sums over the
    vocabulary.
    """
    logits = policy(rollouts.inputs, rollouts.position)                              # (R, M, V)
    full = sampling_logp(logits, config.temperature)                                 # (R, M, V)
    drawn = full if config.top_p == 1 else sampling_logp(logits, config.temperature, config.top_p)
    column = torch.arange(rollouts.target.shape[1], device=full.device)              # (M,)
    logp = drawn[rollouts.row[:, None], column, rollouts.target]                     # (N, M)
    loss, sums = policy_loss(logp, rollouts.old_logp, advantage, weight, config.clip_low, config.clip_high)
    sums |= {"pg_loss": loss.detach(), "trained_tokens": rollouts.mask.sum()}
    by_input = torch.zeros_like(full[..., 0]).index_add_(0, rollouts.row, weight)    # (R, M) a group's weight
    tokens = torch.zeros_like(by_input).index_add_(0, rollouts.row, rollouts.mask)   # (R, M)
    sums["entropy"] = (entropy(full.detach()) * tokens).sum()
    if rollouts.ref_logp is not None:
        kl = exact_kl(full, rollouts.ref_logp)                                       # (R, M)
        penalty = config.kl_beta * (kl * by_input).sum()
        loss = loss + penalty
        sums |= {"kl": (kl.detach() * tokens).sum(), "kl_penalty": penalty.detach()}
    return loss, sums | {"loss": loss.detach()}


def unique_completions(target, mask, G):
    """Number of distinct completions of each group. target, mask: (N, M) -> (P,)."""
    x = (target * mask.long()).view(-1, G, target.shape[1])                          # (P, G, M)
    same = (x[:, :, None] == x[:, None]).all(-1)                                     # (P, G, G)
    return (~same.tril(-1).any(-1)).sum(1)                                           # first of its kind


def rollout_sums(rollouts, reward):
    """What a step's rollouts look like before training on them, as sums. reward: (P, G)."""
    correct = ((rollouts.target == rollouts.truth) * rollouts.mask).sum()
    return {"completions": float(reward.numel()), "problems": float(len(reward)),
            "tokens": rollouts.mask.sum(), "log_prob": (rollouts.old_logp * rollouts.mask).sum(), "correct": correct,
            "reward": reward.sum(), "std_reward": reward.std(1).sum(),
            "frac_reward_zero_std": (reward == reward[:, :1]).all(1).sum(),
            "unique_completions": unique_completions(rollouts.target, rollouts.mask, reward.shape[1]).sum()}


def finish_metrics(out, config):
    """Totals of a step -> the metrics of docs/metrics.md."""
    N, P, tokens, trained = out["completions"], out["problems"], out["tokens"], max(1.0, out["trained_tokens"])
    metrics = {"loss": out["loss"], "pg_loss": out["pg_loss"]}
    if "kl" in out:
        metrics |= {"kl_penalty": out["kl_penalty"], "mean_kl": out["kl"] / trained}
    per = {"mean_reward": ("reward", N), "std_reward": ("std_reward", P), "mean_advantage": ("advantage", tokens),
           "mean_log_prob": ("log_prob", tokens), "mean_token_accuracy": ("correct", tokens),
           "entropy": ("entropy", trained), "clip_fraction": ("clip_fraction", trained),
           "ratio_minus_one": ("ratio_minus_one", trained), "frac_reward_zero_std": ("frac_reward_zero_std", P),
           "unique_completions": ("unique_completions", P)}
    metrics |= {name: out[key] / count for name, (key, count) in per.items()}
    return metrics | {"reward/judge": metrics["mean_reward"], "grad_norm": out["grad_norm"],
                      "skipped_steps": out["skipped_steps"]}


def grpo_training_step(policy, reference, judge, batch, optimizers, lr, step, config, tokenizer, dist,
                       dtype=torch.float32, doing=lambda what: None):
    """One optimizer step of GRPO (arXiv 2402.03300) on the problems of `batch`, this rank's whole share of the step.

    policy, reference (or None), judge: models in eval mode; batch: of DatasetConsumer, joined over micro-batches
    The backward pass runs in micro-batches of config.batch_size inputs; weights and advantages are those of the whole
    step over all ranks, so neither cut changes the gradient. One host sync, at the end; without a KL term one more, to
    leave out the groups whose rewards are all equal.
    doing: is told what takes the time
    Returns the metrics of docs/metrics.md as floats
    """
    doing(f"generating {len(batch['input']) * config.group_size} completions")
    autocast, clock = dist.autocast(dtype), [time.perf_counter()]
    objective = OBJECTIVES[config.objective]
    rollouts = collect(policy, reference, batch, step, config, dist.device, autocast, config.batch_size)
    clock.append(time.perf_counter())
    doing("scoring")
    with autocast:
        reward, credit = compute_rewards(rollouts, judge, tokenizer, config.group_size, config.credit_window)
    clock.append(time.perf_counter())
    doing("training")
    mask = rollouts.mask.view(*credit.shape[:2], -1) if config.credit_window is not None else None
    name = config.advantage or objective.advantage
    advantage = compute_advantages(credit, name, mask, dist.total).flatten(0, 1)     # (N, 1) or (N, M)
    weight = token_weights(rollouts.mask, objective.average, config.block_size, dist.total)
    sums = rollout_sums(rollouts, reward) | {"advantage": (advantage * rollouts.mask).sum()}

    inputs = torch.arange(len(rollouts.inputs), device=dist.device)
    if rollouts.ref_logp is None:  # an all-zero advantage and no KL: nothing to learn, no backward
        inputs = inputs[(advantage.reshape(len(inputs), -1) != 0).any(1)]
    names = ("loss", "pg_loss", "trained_tokens", "entropy", "clip_fraction", "ratio_minus_one")
    trained = dict.fromkeys(names + (("kl", "kl_penalty") if rollouts.ref_logp is not None else ()), 0.0)
    for part in inputs.split(config.batch_size) if len(inputs) else ():
        some, kept = rollouts.select(part)
        with autocast:
            loss, parts = rollout_loss(policy, some, advantage[kept], weight[kept], config)
        loss.backward()
        trained = {name: trained[name] + parts[name] for name in trained}
    out = apply_gradients(policy, optimizers, lr, config.grad_clip, sums | trained, dist)
    clock.append(time.perf_counter())
    phases = zip(("collect", "reward", "train"), clock[:-1], clock[1:], strict=True)
    times = {f"time/{name}": b - a for name, a, b in phases}
    return finish_metrics(out, config) | {"lr": lr} | times
