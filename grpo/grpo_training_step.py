"""The algorithm: one GRPO optimizer step, and its phases: collect, reward, advantage, train."""

import math
import time
from dataclasses import replace

import torch

from core.optim import NONFINITE
from grpo.advantages import compute_advantages
from grpo.kl import choose_estimator, kl_as_reward, kl_penalty, kl_per_token, kl_weight
from grpo.objectives import OBJECTIVES, baseline_of, policy_loss, token_weights
from grpo.rollout import join
from grpo.scoring import score, score_in_batches, with_reference
from grpo.step_metrics import (
    DECIDING, LOGGED, NO_MISMATCH, add_up, check_mismatch, end_step, mismatch, nonfinite_rewards, rollout_sums)

MOST_RESAMPLES = 3  # rounds of zero_std='resample'; groups whose rewards are then still equal are dropped
BAD_REWARDS = f"{NONFINITE}rewards"


class Timer:
    """Seconds of each phase. A phase lasts from the end of the one before it to its own end."""

    def __init__(self):
        self.times = {}
        self.last = time.perf_counter()

    def end(self, phase):
        now = time.perf_counter()
        self.times[phase] = self.times.get(phase, 0.0) + now - self.last
        self.last = now

    def metrics(self):
        return {f"time/{phase}": seconds for phase, seconds in self.times.items()}


def grpo_training_step(policy, reference, rewards, problems, optimizers, iteration, config, dist):
    """One optimizer step of GRPO (arXiv 2402.03300) on rollouts of its own, for callers from Python. The trainer calls
    the phases itself, because several steps may share rollouts.

    policy, reference (or None): policies; rewards: a Rewards, or any function rollouts -> Scored
    problems: again -> this rank's problems; 0 for the iteration's own, 1, 2, ... for others that replace groups of
        equal rewards
    iteration: number of the round of rollouts; the sampling noise depends on it
    Returns the metrics of docs/metrics.md as floats
    """
    timer = Timer()
    sample = sampler_of(policy, problems, iteration, config)
    rollouts, sums, _ = collect_rollouts(policy, reference, rewards, sample, config, dist, timer)
    metrics = train_on_rollouts(policy, rollouts, sums, optimizers, config, dist)
    timer.end("train")
    return metrics | timer.metrics()


def sampler_of(policy, problems, iteration, config):
    """The function `sample` of collect_rollouts for a policy that samples by itself; problems: again -> problems."""
    def sample(again, count=None):
        return policy.sample({key: x[:count] for key, x in problems(again).items()}, iteration, config), {}
    return sample


def collect_rollouts(policy, reference, rewards, sample, config, dist, timer):
    """Phases 1 to 3 for this rank's share of an iteration.

    sample: (again, count) -> (Rollouts, sums of metrics) of the iteration's own problems (again=0), or of the first
        `count` of other problems (again=1, 2, ...)
    Returns the rollouts to train on, with their advantage; {metric: (sum, count)} as in grpo/step_metrics.py; and
    [(Rollouts with texts, Scored)] of all that was sampled
    """
    sums, sampled = {}, []

    def collect_round(again, count=None):
        """Phases 1 and 2: rollouts, a Scored, and (P,) bool: the rewards of a group differ."""
        nonlocal sums
        rollouts, of_sampler = sample(again, count)
        timer.end("collect")
        if reference is not None:
            rollouts = with_reference(rollouts, reference, choose_estimator(config, policy), config)
            timer.end("reference")
        scored = rewards(rollouts)
        useful = differ(scored)
        scored = with_penalties(scored, rollouts, config)
        bad = nonfinite_rewards(scored, rollouts.mask)
        sums = add_up(sums, of_sampler | {BAD_REWARDS: (bad, None)})
        sampled.append((replace(rollouts, ref_distributions=None), scored))
        timer.end("reward")
        return rollouts, scored, useful

    with dist.gathered():
        rollouts, scored, useful = collect_round(0)
        sums |= rollout_sums(rollouts, scored, useful, OBJECTIVES[config.objective].discriminative)
        if scored.metrics is not None:  # the functions of a rank may log others than those of the next
            for name in dist.names_of_all(scored.metrics):
                sums[LOGGED + name] = scored.metrics.get(name, (0.0, 0))
        if config.zero_std != "keep":
            rollouts, scored = keep_groups(rollouts, scored, useful)
        if config.zero_std == "resample":
            rollouts, scored, resampled = resample_groups(rollouts, scored, collect_round, config, dist)
            sums["resampled"] = resampled, float(len(useful))
        rollouts = compute_rollout_advantages(rollouts, scored, config, dist)
        train_mask = rollouts.train_mask
        sums["mean_advantage"] = (rollouts.advantage * train_mask).sum(), train_mask.sum()
        timer.end("advantage")
        if rescores(config):
            logp = score_in_batches(policy, rollouts, config)                        # (N, M)
            sums |= mismatch(logp, rollouts)
            rollouts = replace(rollouts, old_logp=logp)  # the first ratio is exactly 1 whoever sampled
            timer.end("rescore")
    return replace(rollouts, texts=None), sums, sampled


def rescores(config):
    """True if the policy scores rollouts before the first of several steps on them."""
    return config.ratio_to == "policy" and config.ppo_epochs * config.minibatches > 1


def with_penalties(scored, rollouts, config):
    """The rewards with the penalties that the config adds to their credit; `values` has them too."""
    credit = scored.credit                                                           # (P, G, 1 or M)
    penalties = {}
    if config.overlong_buffer:
        length = rollouts.mask.sum(1)                                                # (N,)
        penalties["overlong"] = overlong(length, rollouts.max_tokens, config.overlong_buffer)
        credit = credit + rollouts.by_problem(penalties["overlong"])[..., None]
    if config.kl_in_reward and rollouts.ref_logp is not None:
        per_token = kl_as_reward(rollouts, kl_weight(config))                         # (N, M)
        penalties["kl"] = per_token.sum(1)                                           # (N,)
        per_credit = per_token if credit.shape[2] > 1 else penalties["kl"]
        credit = credit + per_credit.view(credit.shape)
    return replace(scored, credit=credit, values=scored.values | penalties)


def overlong(length, longest, buffer):
    """The soft punishment of DAPO (arXiv 2503.14476 eq. 13): 0 up to longest - buffer tokens, then down to -1 at
    longest. length: (N,) -> (N,)."""
    return ((longest - buffer - length) / buffer).clamp(-1.0, 0.0)


def compute_rollout_advantages(rollouts, scored, config, dist):
    """Phase 3: the rollouts with their advantage, and a train_mask without the completions that no reward scored and,
    with mask_truncated, those that ran out of room."""
    seen = (~scored.reward.isnan()).float()                                          # (P, G)
    credited = seen[..., None].expand_as(scored.credit)                              # (P, G, 1 or M)
    if credited.shape[2] > 1:
        credited = credited * rollouts.by_problem(rollouts.mask)
    credit = torch.where(credited > 0, scored.credit, 0.0)                           # (P, G, 1 or M)
    advantage = compute_advantages(credit, baseline_of(config), credited, dist.total)
    if scored.weight is not None:
        advantage = advantage * scored.weight[..., None]
    train_mask = rollouts.train_mask * seen.view(-1, 1)
    if config.mask_truncated:
        train_mask = train_mask * ~rollouts.truncated[:, None]
    return replace(rollouts, train_mask=train_mask, advantage=advantage.flatten(0, 1))


def differ(scored):
    """(P,) bool: groups whose rewards are not all equal. Rewards that were changed for the loss (reward_normalisation)
    are compared as it sees them."""
    per_completion = scored.credit.shape[2] == 1
    reward = scored.credit[..., 0] if per_completion else scored.reward              # (P, G)
    skipped = scored.reward.isnan()
    highest = reward.masked_fill(skipped, -torch.inf).amax(1)                        # (P,)
    lowest = reward.masked_fill(skipped, torch.inf).amin(1)
    return highest > lowest


def keep_groups(rollouts, scored, useful):
    """Only the groups for which useful (P,) is True."""
    rollouts, _ = rollouts.select(useful.nonzero().squeeze(1).cpu())
    return rollouts, scored.select(useful)


def resample_groups(rollouts, scored, collect_round, config, dist):
    """Dynamic sampling (arXiv 2503.14476 section 3.2): other problems in place of the groups that were dropped, in at
    most MOST_RESAMPLES rounds, until no rank misses a group.

    collect_round: (again, count) -> the arguments of keep_groups
    Returns rollouts, Scored, and the number of problems sampled in addition
    """
    wanted = config.batch_size * config.gradient_accumulation_steps
    resampled = 0.0
    for again in range(1, MOST_RESAMPLES + 1):
        missing = wanted - rollouts.problems
        if not int(dist.total(torch.tensor(missing, device=dist.device))):
            break
        if missing:
            resampled += missing
            more_rollouts, more_scored = keep_groups(*collect_round(again, missing))
            rollouts = join([rollouts, more_rollouts])
            scored = join([scored, more_scored])
    return rollouts, scored, resampled


def train_on_rollouts(policy, rollouts, sums, optimizers, config, dist, on_policy=True):
    """Phase 4: one optimizer step on this rank's share. Returns the metrics as floats.

    sums: those of collect_rollouts; on_policy: the policy has not moved since the rollouts were sampled
    The backward pass runs in micro-batches. The weights are those of the whole step over all ranks, so that neither the
    cut nor the number of ranks changes the gradient.
    """
    weight = loss_weights(rollouts, OBJECTIVES[config.objective].average, dist)
    problems, learned = needed_problems(rollouts, config)
    trained = empty_sums(rollouts, on_policy, config)
    reading = rollouts.reading
    parts = reading.micro_batches(config, problems)
    for part, missing in dist.in_step(parts, lambda part: policy.calls(reading.select(part))):
        loss = policy.idle_loss(missing) if missing else 0.0
        if part is not None:
            micro, rows = rollouts.select(part)
            own, more = rollout_loss(policy, micro, weight[rows], config, on_policy)
            loss = loss + own
            trained = add_up(trained, {name: more[name] for name in trained})
        loss.backward()
    trained["loss_tokens"] = learned.sum(), None
    totals, metrics = end_step(policy, optimizers, sums | trained, config, dist)
    if config.sampler != "local" and config.scores_as_drawn:
        check_mismatch(metrics, config.sampler)
    finite = all(math.isfinite(totals[name]) for name in sums if name in DECIDING)
    metrics["bad_rollouts"] = int(not finite or totals.get(BAD_REWARDS, 0) > 0)
    return metrics


def loss_weights(rollouts, average, dist):
    """(N, M) token_weights over the whole step. They count all tokens of the completions, also those that an estimator
    leaves out: it weighs the others more."""
    weight = token_weights(rollouts.train_mask, average, rollouts.max_tokens, dist.total)
    if rollouts.token_weight is not None:
        weight = weight * rollouts.token_weight
    return weight


def needed_problems(rollouts, config):
    """The problems that the loss or its metrics must read, as indices, and (N, M) 1.0 where a token has a gradient.

    Without entropy bonus and KL in the loss, advantages of 0 give no gradient. With a reference the KL of all problems
    is measured, so all are read.
    """
    problems = torch.arange(rollouts.problems)
    learned = rollouts.scored                                                        # (N, M)
    if config.entropy_bonus == 0 and (config.kl_in_reward or not rollouts.has_reference):
        learned = learned * (rollouts.advantage != 0)
        if not rollouts.has_reference:
            useful = rollouts.by_problem(learned.any(1)).any(1)                      # (P,)
            problems = problems[useful.cpu()]
    return problems, learned


def empty_sums(rollouts, on_policy, config):
    """The sums of rollout_loss before the first micro-batch: all ranks have the same, though one may train on none."""
    nothing = 0.0, 0.0
    sums = {"loss": (0.0, None), "pg_loss": (0.0, None), "entropy": nothing, "clip_fraction": nothing,
            "kl_to_old": nothing}
    if rollouts.has_reference:
        sums |= {"mean_kl": nothing, "kl_penalty": (0.0, None)}
    if on_policy and not rescores(config):
        sums |= NO_MISMATCH
    return sums


def rollout_loss(policy, rollouts, weight, config, on_policy=True):
    """Loss of a micro-batch of rollouts, and {metric: (sum, count)}, so that both add up over micro-batches and ranks.

    rollouts: with their advantage; weight: (N, M) from token_weights over the whole step
    on_policy: this is the first step on the rollouts, so the ratio to the policy before it is exactly 1. Otherwise, and
        with ratio_to='sampler', the ratio is to rollouts.old_logp
    """
    scores = score(policy, rollouts, config.temperature, learn_entropy=config.entropy_bonus > 0)
    scored = rollouts.scored                                                         # (N, M)
    tokens = scored.sum()
    old_logp = rollouts.old_logp                                                     # (N, M)
    if on_policy and config.ratio_to == "policy":
        old_logp = scores.logp.detach()
    loss, ratio, changed = policy_loss(scores.logp, old_logp, rollouts.advantage, weight, OBJECTIVES[config.objective],
                                       config.clip_low, config.clip_high)
    sums = {name: (x, tokens) for name, x in changed.items()}
    sums["pg_loss"] = loss.detach(), None
    sums["entropy"] = (scores.entropy.detach() * scored).sum(), tokens
    if on_policy:
        sums |= mismatch(scores.logp, rollouts)
    kl = kl_per_token(scores, rollouts, choose_estimator(config, policy), ratio)
    if kl is not None:
        penalty = kl_penalty(kl, weight, config)
        loss = loss + penalty
        sums["mean_kl"] = (kl.detach() * scored).sum(), tokens
        sums["kl_penalty"] = penalty.detach(), None
    if config.entropy_bonus > 0:
        entropy = torch.where(weight > 0, scores.entropy * weight, 0.0).sum()
        loss = loss - config.entropy_bonus * entropy
    sums["loss"] = loss.detach(), None
    return loss, sums
