"""One GRPO optimizer step: sample groups, score, subtract baselines, backward, apply."""

import time
from dataclasses import replace

import torch

from core.training_step import apply_gradients
from grpo.advantages import compute_advantages
from grpo.objectives import KL_ESTIMATORS, OBJECTIVES, policy_loss, token_weights
from grpo.rollout import collect
from grpo.scoring import score, with_reference


def rollout_loss(policy, rollouts, advantage, weight, config, on_policy=True):
    """Loss of some rollouts of a step, and metrics as sums, so that both add up over micro-batches and ranks.

    advantage: (N, 1) or (N, M); weight: (N, M) from token_weights over the whole step
    on_policy: the policy at hand wrote the rollouts, so the ratio is exactly 1; else it is to rollouts.old_logp
    """
    said, mask = score(policy, rollouts, config.temperature), rollouts.mask
    old_logp = said.logp.detach() if on_policy else rollouts.old_logp                # (N, M)
    loss, sums = policy_loss(said.logp, old_logp, advantage, weight, config.clip_low, config.clip_high)
    apart = (said.logp.detach() - rollouts.old_logp).masked_fill(mask == 0, 0.0)     # sampler and scorer
    sums |= {"pg_loss": loss.detach(), "trained_tokens": mask.sum(), "entropy": (said.entropy * mask).sum(),
             "ratio_minus_one": (apart.clamp(-20, 20).exp() - 1).abs().sum()}
    kl = said.kl                                                                     # (N, M)
    if rollouts.ref_logp is not None:
        kl = KL_ESTIMATORS[rollouts.kl_estimator](said.logp, rollouts.ref_logp)
    if kl is not None:
        penalty = config.kl_beta * torch.where(weight > 0, kl * weight, 0.0).sum()
        loss = loss + penalty
        sums |= {"kl": (kl.detach() * mask).sum(), "kl_penalty": penalty.detach()}
    return loss, sums | {"loss": loss.detach()}


def unique_completions(target, mask, G):
    """Number of distinct completions of each group. target, mask: (N, M) -> (P,)."""
    x = (target * mask.long()).view(-1, G, target.shape[1])                          # (P, G, M)
    same = (x[:, :, None] == x[:, None]).all(-1)                                     # (P, G, G)
    return (~same.tril(-1).any(-1)).sum(1)                                           # first of its kind


def rollout_sums(rollouts, reward, values):
    """What a step's rollouts look like before training on them, as sums. reward: (P, G), NaN where not scored."""
    seen, mask = ~reward.isnan(), rollouts.mask
    low, high = (reward.masked_fill(~seen, x) for x in (torch.inf, -torch.inf))
    count = seen.sum(1).clamp(min=1)                                                 # (P,)
    mean = (reward.nansum(1) / count)[:, None]
    std = ((reward - mean).square().nansum(1) / (count - 1).clamp(min=1)).sqrt()
    sums = {"completions": float(reward.numel()), "problems": float(len(reward)), "scored": seen.sum(),
            "tokens": mask.sum(), "log_prob": (rollouts.old_logp * mask).sum(), "reward": reward.nansum(),
            "std_reward": std.sum(), "frac_reward_zero_std": (high.amax(1) <= low.amin(1)).sum(),
            "unique_completions": unique_completions(rollouts.target, mask, reward.shape[1]).sum()}
    for name, x in values.items():
        sums |= {f"reward/{name}": x.nansum(), f"scored/{name}": (~x.isnan()).sum()}
    sums["text_tokens"] = mask.sum() if rollouts.tokens is None else float(rollouts.tokens.numel())
    if rollouts.truth is not None:
        sums["correct"] = ((rollouts.target == rollouts.truth) * mask).sum()
    if rollouts.truncated is not None:
        sums["truncated"] = rollouts.truncated.sum()
    return sums


def finish_metrics(out, config):
    """Totals of a step -> the metrics of docs/metrics.md."""
    N, P, tokens, trained = out["completions"], out["problems"], out["tokens"], max(1.0, out["trained_tokens"])
    metrics = {"loss": out["loss"], "pg_loss": out["pg_loss"]}
    if "kl" in out:
        metrics |= {"kl_penalty": out["kl_penalty"], "mean_kl": out["kl"] / trained}
    per = {"mean_reward": ("reward", max(1.0, out["scored"])), "std_reward": ("std_reward", P),
           "mean_advantage": ("advantage", tokens), "mean_log_prob": ("log_prob", tokens),
           "mean_token_accuracy": ("correct", tokens), "entropy": ("entropy", trained),
           "clip_fraction": ("clip_fraction", trained), "ratio_minus_one": ("ratio_minus_one", trained),
           "frac_reward_zero_std": ("frac_reward_zero_std", P), "unique_completions": ("unique_completions", P),
           "truncated": ("truncated", N)}
    metrics |= {name: out[key] / count for name, (key, count) in per.items() if key in out}
    metrics |= {f"reward/{name}": out[f"reward/{name}"] / max(1.0, out[f"scored/{name}"])
                for name in [key.removeprefix("scored/") for key in out if key.startswith("scored/") and out[key]]}
    if "truncated" in out:
        metrics["completion_length"] = tokens / N
    return metrics | {"text_tokens": out["text_tokens"], "grad_norm": out["grad_norm"],
                      "skipped_steps": out["skipped_steps"], "skipped_samples": N - out["scored"]}


def grpo_training_step(policy, reference, rewards, batch, optimizers, lr, step, config, tokenizer, dist,
                       dtype=torch.float32, doing=lambda what: None):
    """One optimizer step of GRPO (arXiv 2402.03300) on the problems of `batch`, this rank's whole share of the step.

    policy, reference (or None): models in eval mode; rewards: a Rewards, or any rollouts -> (reward, credit, values)
    batch: of DatasetConsumer or PromptConsumer, joined over micro-batches; doing: is told what takes the time
    The backward pass runs in micro-batches of config.batch_size problems; weights and advantages are those of the whole
    step over all ranks, so neither cut changes the gradient.
    Returns the metrics of docs/metrics.md as floats
    """
    doing(f"generating {len(batch['input']) * config.group_size} completions")
    autocast, clock, objective = dist.autocast(dtype), [time.perf_counter()], OBJECTIVES[config.objective]
    rollouts = collect(policy, batch, step, config, tokenizer, dist.device, autocast, config.batch_size)
    rollouts = with_reference(rollouts, reference, config.temperature, config.batch_size, autocast)
    clock.append(time.perf_counter())
    doing("scoring")
    with autocast:
        reward, credit, values = rewards(rollouts)                                   # (P, G), (P, G, 1 or M)
    clock.append(time.perf_counter())
    doing("training")
    sums = rollout_sums(rollouts, reward, values)
    advantage, rollouts = judge_completions(rollouts, reward, credit, config, dist)  # (N, 1 or M)
    weight = token_weights(rollouts.mask, objective.average, rollouts.longest, dist.total)
    sums["advantage"] = (advantage * rollouts.mask).sum()

    problems = torch.arange(rollouts.problems)
    if reference is None:  # an all-zero advantage and no KL: nothing to learn, no backward
        problems = problems[(advantage.view(len(problems), -1) != 0).any(1).cpu()]
    names = ("loss", "pg_loss", "trained_tokens", "entropy", "clip_fraction", "ratio_minus_one")
    trained = dict.fromkeys(names + (("kl", "kl_penalty") if reference is not None else ()), 0.0)
    for part in problems.split(config.batch_size) if len(problems) else ():
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


def judge_completions(rollouts, reward, credit, config, dist):
    """(advantage (N, 1 or M), rollouts), the latter without the tokens that must not be trained on: of completions that
    no reward scored and, with mask_truncated, of those that ran out of room."""
    scored = (~reward.isnan()).float()                                               # (P, G)
    mask = scored[..., None] * torch.ones_like(credit)                               # (P, G, 1 or M)
    if credit.shape[2] > 1:
        mask = mask * rollouts.mask.view_as(credit)
    name = config.advantage or OBJECTIVES[config.objective].advantage
    advantage = compute_advantages(credit.nan_to_num(0.0), name, mask, dist.total).flatten(0, 1)
    trained = rollouts.mask * scored.view(-1, 1)
    if config.mask_truncated and rollouts.truncated is not None:
        trained = trained * ~rollouts.truncated[:, None]
    return advantage, replace(rollouts, mask=trained)
