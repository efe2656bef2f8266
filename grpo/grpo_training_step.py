"""The algorithm: one GRPO optimizer step, and its phases: collect, reward, advantage, train."""

import math
import time
from dataclasses import dataclass, field, replace

import torch

from core.performance.sharding import gathered, in_step
from core.training_step import NONFINITE, apply_gradients, total_over_ranks
from grpo.advantages import compute_advantages
from grpo.kl import choose_estimator, kl_as_reward, kl_penalty, kl_per_token
from grpo.objectives import OBJECTIVES, policy_loss, token_weights
from grpo.rollout import Rollouts, Scored, join_rollouts, plain
from grpo.samplers.mismatch import MISMATCH, check_mismatch, mismatch, with_importance
from grpo.scoring import check_rollouts, score, score_in_batches, with_reference
from grpo.step_metrics import DECIDING, LARGEST, add_up, finish_metrics, logged_sums, nonfinite_rewards, rollout_sums

MOST_RESAMPLES = 3  # rounds of zero_std='resample'; groups whose rewards are then still equal are dropped


@dataclass
class Experience:
    """Rollouts with their advantages, or a minibatch of them, and the sums that metrics are made of."""
    rollouts: Rollouts
    sums: dict
    sampled: list = field(default_factory=list)  # [(Texts, Scored)] of all that was sampled in the iteration
    on_policy: bool = True                       # whether the policy has not moved since the rollouts were sampled

    def plain(self):
        """The step's data as plain tensors and values on the CPU. Distributions over the vocabulary are left out: they
        are large, and the models give them again."""
        rollouts = replace(self.rollouts, texts=None, ref_distributions=None,
                           reading=replace(self.rollouts.reading, kept=None)).to("cpu")
        sampled = []
        for texts, scored in self.sampled:
            values = {name: x.cpu() for name, x in scored.values.items()}
            sampled.append({"prompts": texts.prompts, "completions": texts.completions, "reward": scored.reward.cpu(),
                            "values": values})
        return {"rollouts": plain(rollouts), "sampled": sampled, "on_policy": self.on_policy}


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
    experience = collect_experience(policy, reference, rewards, sample, config, dist, timer)
    metrics = train_on_experience(policy, experience, optimizers, config, dist)
    timer.end("train")
    return metrics | timer.metrics()


def sampler_of(policy, problems, iteration, config):
    """The function `sample` of collect_experience for a policy that samples by itself; problems: again -> problems."""
    def sample(again, count=None):
        batch = {key: x[:count] for key, x in problems(again).items()}
        return policy.sample(batch, iteration, config), {}
    return sample


def collect_experience(policy, reference, rewards, sample, config, dist, timer):
    """Phases 1 to 3 for this rank's share of an iteration: an Experience.

    sample: (again, count) -> (Rollouts, sums for metrics) of the iteration's own problems (again=0), or of the first
        `count` of other problems (again=1, 2, ...)
    """
    sampled, sums = [], {}

    def collect_round(again, count=None):
        found, sampler_sums = sample(again, count)
        rollouts, scored, more = collect_rollouts(policy, reference, rewards, found, config, timer)
        sampled.append((rollouts.texts, scored))
        for name, x in (sampler_sums | more).items():
            sums[name] = sums.get(name, 0.0) + x
        return rollouts, scored

    with gathered(dist):
        rollouts, scored = collect_round(0)
        sums |= rollout_sums(rollouts, scored, differ(scored.compared), OBJECTIVES[config.objective].discriminative)
        if scored.metrics is not None:  # the functions of a rank may log others than those of the next
            sums |= logged_sums(scored.metrics, dist.names_of_all(scored.metrics))
        rollouts = replace(rollouts, texts=None)
        if config.zero_std != "keep":
            rollouts, scored = keep_groups(rollouts, scored)
        if config.zero_std == "resample":
            rollouts, scored, sums["resampled"] = resample_groups(rollouts, scored, collect_round, config, dist)
        rollouts = compute_rollout_advantages(rollouts, scored, config, dist)
        train_mask = rollouts.train_mask
        sums["advantage"] = (rollouts.advantage * train_mask).sum()
        sums["advantage_tokens"] = train_mask.sum()
        timer.end("advantage")
        if rescores(config):
            rollouts, more = with_old_logp(policy, rollouts, config)
            sums |= more
            timer.end("rescore")
    return Experience(rollouts, sums, sampled)


def collect_rollouts(policy, reference, rewards, rollouts, config, timer):
    """Phases 1 and 2 for sampled rollouts: these with the reference's log-probabilities, a Scored, and sums of
    metrics."""
    timer.end("collect")
    if reference is not None:
        rollouts = with_reference(rollouts, reference, choose_estimator(config, policy), config)
        timer.end("reference")
    scored = compute_rewards(rewards, rollouts, config)
    bad = nonfinite_rewards(scored, rollouts.mask)
    timer.end("reward")
    return rollouts, scored, {f"{NONFINITE}rewards": bad}


def rescores(config):
    """Whether the policy scores rollouts before the first step on them: for several steps, or importance weights."""
    return config.ppo_epochs * config.minibatches > 1 or config.importance != "none"


def with_old_logp(policy, rollouts, config):
    """The rollouts with old_logp of the policy before its first step on them, and sums of metrics.

    The first ratio is then exactly 1 whoever sampled them. Importance weights correct the difference from the sampler's
    log-probabilities.
    """
    logp = score_in_batches(policy, rollouts, config)                                # (N, M)
    sums = mismatch(logp, rollouts)
    if config.importance != "none":
        rollouts, more = with_importance(rollouts, logp, config)
        sums |= more
    return replace(rollouts, old_logp=logp), sums


def compute_rewards(rewards, rollouts, config):
    """Phase 2: a Scored whose credit and values contain the penalties that the config adds."""
    scored = rewards(rollouts)
    credit = scored.credit                                                           # (P, G, 1 or M)
    penalties = {}
    if config.overlong_buffer:
        length = rollouts.mask.sum(1)                                                # (N,)
        penalty = config.overlong_penalty * overlong(length, rollouts.max_tokens, config.overlong_buffer)
        penalties["overlong"] = penalty                                              # (N,)
        credit = credit + penalty.view(*credit.shape[:2], 1)
    if config.kl_in_reward and rollouts.ref_logp is not None:
        per_token = kl_as_reward(rollouts, config.kl_beta)                           # (N, M)
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
    credited = seen[..., None] * torch.ones_like(scored.credit)                      # (P, G, 1 or M)
    if credited.shape[2] > 1:
        credited = credited * rollouts.mask.view_as(credited)
    credit = torch.where(credited > 0, scored.credit, 0.0)                           # (P, G, 1 or M)
    advantage = compute_advantages(credit, config.baseline, credited, dist.total)
    if config.train_pass_k > 1:
        advantage = advantage * scored.weight[..., None]
    train_mask = rollouts.train_mask * seen.view(-1, 1)
    if config.mask_truncated:
        train_mask = train_mask * ~rollouts.truncated[:, None]
    return replace(rollouts, train_mask=train_mask, advantage=advantage.flatten(0, 1))


def differ(reward):
    """(P,) bool: groups whose rewards (P, G), NaN where not scored, are not all equal."""
    seen = ~reward.isnan()
    return reward.masked_fill(~seen, -torch.inf).amax(1) > reward.masked_fill(~seen, torch.inf).amin(1)


def keep_groups(rollouts, scored):
    """Only the groups whose rewards differ."""
    useful = differ(scored.compared)
    return rollouts.select(useful.nonzero().squeeze(1).cpu())[0], scored.select(useful)


def resample_groups(rollouts, scored, collect_round, config, dist):
    """Dynamic sampling (arXiv 2503.14476 section 3.2): other problems in place of the groups that were dropped.

    collect_round: (again, count) -> (rollouts, Scored). At most MOST_RESAMPLES rounds, in which every rank takes part
    until no rank misses a group. Returns rollouts, Scored, and the number of problems that were sampled in addition
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
            rollouts = join_rollouts([rollouts, more_rollouts])
            scored = Scored.join([scored, more_scored])
            check_rollouts(rollouts, config)
    return rollouts, scored, resampled


def train_on_experience(policy, experience, optimizers, config, dist):
    """Phase 4: one optimizer step on this rank's share. Returns the metrics as floats.

    The backward pass runs in micro-batches. The weights are those of the whole step over all ranks, so that neither the
    cut nor the number of ranks changes the gradient.
    """
    rollouts, on_policy = experience.rollouts, experience.on_policy
    weight = token_weights(rollouts.train_mask, OBJECTIVES[config.objective].average, rollouts.max_tokens, dist.total)
    problems, learned = needed_problems(rollouts, config)
    trained = empty_sums(rollouts, on_policy and not rescores(config))
    reading = rollouts.reading
    parts = reading.micro_batches(config, problems)
    for part, missing in in_step(parts, lambda part: policy.calls(reading.select(part)), dist):
        loss = 0.0
        if missing:
            loss = policy.idle_loss(missing)
        if part is not None:
            micro, rows = rollouts.select(part)
            own, sums = rollout_loss(policy, micro, weight[rows], config, on_policy)
            loss = loss + own
            trained = add_up(trained, sums)
        loss.backward()
    sums = total_over_ranks(experience.sums | trained | {"loss_tokens": learned.sum()}, dist, LARGEST)
    dist.sum_gradients(policy.parameters())
    totals = apply_gradients(policy.parameters(), optimizers, config.grad_clip, sums, "loss_tokens", DECIDING)
    metrics = finish_metrics(totals)
    if config.sampler != "local" and config.fill_estimator == "trajectory":  # the others estimate that probability
        check_mismatch(metrics, config.sampler)
    finite = all(math.isfinite(totals[name]) for name in experience.sums if name in DECIDING)
    metrics["bad_rollouts"] = int(not finite or totals.get(f"{NONFINITE}rewards", 0) > 0)
    return metrics


def has_reference(rollouts):
    """Whether a reference has scored the rollouts."""
    return rollouts.ref_logp is not None or rollouts.ref_distributions is not None


def needed_problems(rollouts, config):
    """The problems that the loss or its metrics must read, as indices, and (N, M) 1.0 where a token has a gradient.

    Without entropy bonus and KL in the loss, advantages of 0 give no gradient. With a reference the KL of all problems
    is measured, so all are read.
    """
    problems = torch.arange(rollouts.problems)
    learned = rollouts.train_mask                                                    # (N, M)
    by_advantage_alone = config.entropy_bonus == 0 and (config.kl_in_reward or not has_reference(rollouts))
    if by_advantage_alone:
        learned = learned * (rollouts.advantage != 0)
    if by_advantage_alone and not has_reference(rollouts):
        useful = rollouts.by_problem(learned.any(1)).any(1)                          # (P,)
        problems = problems[useful.cpu()]
    return problems, learned


def empty_sums(rollouts, measures_mismatch):
    """The sums of rollout_loss before the first micro-batch."""
    names = ["loss", "pg_loss", "trained_tokens", "entropy", "clip_fraction", "kl_to_old"]
    if has_reference(rollouts):
        names += ["kl", "kl_penalty"]
    if measures_mismatch:
        names += MISMATCH
    sums = dict.fromkeys(names, 0.0)
    if measures_mismatch:
        sums |= dict.fromkeys(LARGEST, -math.inf)
    return sums


def rollout_loss(policy, rollouts, weight, config, on_policy=True):
    """Loss of a micro-batch of rollouts, and metrics as sums, so that both add up over micro-batches and ranks.

    rollouts: with their advantage; weight: (N, M) from token_weights over the whole step
    on_policy: the policy has not moved since the rollouts were sampled, so the ratio is exactly 1; otherwise the ratio
        is to rollouts.old_logp
    """
    scores = score(policy, rollouts, config.temperature, learn_entropy=config.entropy_bonus > 0)
    train_mask = rollouts.train_mask                                                 # (N, M)
    old_logp = scores.logp.detach() if on_policy else rollouts.old_logp              # (N, M)
    loss, ratio, sums = policy_loss(scores.logp, old_logp, rollouts.advantage, weight, OBJECTIVES[config.objective],
                                    config.clip_low, config.clip_high, config.clip_cap)
    sums["pg_loss"] = loss.detach()
    sums["trained_tokens"] = train_mask.sum()
    sums["entropy"] = (scores.entropy.detach() * train_mask).sum()
    if on_policy:
        sums |= mismatch(scores.logp, rollouts)
    kl = kl_per_token(scores, rollouts, choose_estimator(config, policy), ratio if config.kl_importance else None)
    if kl is not None:
        penalty = kl_penalty(kl, weight, config)
        loss = loss + penalty
        sums["kl"] = (kl.detach() * train_mask).sum()
        sums["kl_penalty"] = penalty.detach()
    if config.entropy_bonus > 0:
        loss = loss - config.entropy_bonus * torch.where(weight > 0, scores.entropy * weight, 0.0).sum()
    sums["loss"] = loss.detach()
    return loss, sums
