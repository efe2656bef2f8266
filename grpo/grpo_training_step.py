"""The algorithm: one GRPO optimizer step, and its phases: collect, reward, advantage, train."""

import math
import time
from dataclasses import dataclass, field, replace

import torch

from core.performance.sharding import gathered, in_step
from core.training_step import NONFINITE, apply_gradients
from grpo.advantages import compute_advantages
from grpo.kl import choose_estimator, kl_as_reward, kl_penalty, kl_per_token
from grpo.objectives import OBJECTIVES, policy_loss, token_weights
from grpo.rollout import Rollouts, join_rollouts, plain
from grpo.samplers.mismatch import MISMATCH, check_mismatch, mismatch, with_importance
from grpo.samplers.sampler import Finished
from grpo.scoring import check_rollouts, score, score_in_batches, with_reference
from grpo.step_metrics import DECIDING, LARGEST, add_up, finish_metrics, logged_sums, nonfinite_rewards, rollout_sums

MOST_RESAMPLES = 3  # rounds of zero_std='resample'; groups whose rewards are then still equal are dropped


@dataclass
class Experience:
    """Rollouts with their advantages, or a minibatch of them, and the sums that metrics are made of."""
    rollouts: Rollouts
    sums: dict
    on_policy: bool = True                       # the first step on them: the policy is as it was when they came
    times: dict = field(default_factory=dict)    # {phase: seconds} that collecting them took, in their first step
    sampled: list = field(default_factory=list)  # [(Texts, Scored)] of all that was sampled in the iteration

    def plain(self):
        """What the step was made of, as plain tensors and values on the CPU. Distributions over the vocabulary are left
        out: they are large, and the models give them again."""
        rollouts = replace(self.rollouts, texts=None, ref_distributions=None,
                           reading=replace(self.rollouts.reading, kept=None)).to("cpu")
        sampled = [{"prompts": texts.prompts, "completions": texts.completions, "reward": scored.reward.cpu(),
                    "values": {name: x.cpu() for name, x in scored.values.items()}} for texts, scored in self.sampled]
        return {"rollouts": plain(rollouts), "sampled": sampled, "on_policy": self.on_policy}


class Timer:
    """Seconds of each phase: a phase lasts from the end of the one before to its own end."""

    def __init__(self):
        self.times, self.last = {}, time.perf_counter()

    def end(self, phase):
        now = time.perf_counter()
        self.times[phase], self.last = self.times.get(phase, 0.0) + now - self.last, now


def grpo_training_step(policy, reference, rewards, problems, optimizers, lr, iteration, config, dist, kl_beta=None,
                       hand_out=lambda collect: collect(), doing=lambda what: None, take=None):
    """One optimizer step of GRPO (arXiv 2402.03300).

    policy, reference (or None): policies; rewards: a Rewards, or any function rollouts -> Scored
    problems: again -> this rank's problems; 0 for the iteration's own, 1, 2, ... for others that replace groups of
        equal rewards
    iteration: number of the round of rollouts; the sampling noise depends on it
    hand_out: collect -> the Experience of this step: what collect() wrote, or a minibatch of what it wrote before
    doing: is told what takes the time
    take: (problems, again) -> a Finished (grpo/samplers/sampler.py); None: the policy writes
    Returns the metrics of docs/metrics.md as floats
    """
    kl_beta = config.kl_beta if kl_beta is None else kl_beta

    def collect():
        with gathered(dist):
            return collect_experience(policy, reference, rewards, problems, iteration, config, dist, kl_beta, doing,
                                      take)

    experience = hand_out(collect)
    doing("training")
    timer = Timer()
    metrics = train_on_experience(policy, experience, optimizers, lr, config, dist, kl_beta)
    timer.end("train")
    return metrics | {f"time/{phase}": seconds for phase, seconds in (experience.times | timer.times).items()}


def collect_experience(policy, reference, rewards, problems, iteration, config, dist, kl_beta, doing=lambda what: None,
                       take=None):
    """Phases 1 to 3 for this rank's share of an iteration: rollouts with their advantages."""
    timer, objective, taken, bad, written = Timer(), OBJECTIVES[config.objective], [], [], []
    take = take or (lambda batch, again: Finished(policy.sample(batch, iteration, config), iteration))

    def sampled(batch, again=0):
        doing(f"generating {len(batch['number']) * config.group_size} completions")
        finished = collect_rollouts(policy, reference, lambda: take(batch, again), config, timer)
        rollouts = finished.rollouts
        doing("scoring")
        scored = compute_rewards(lambda rollouts: finished.scored or rewards(rollouts), rollouts, config, kl_beta)
        written.append(finished)
        taken.append((rollouts.texts, scored))
        bad.append(nonfinite_rewards(scored, rollouts.mask))
        timer.end("reward")
        return rollouts, scored

    rollouts, scored = sampled(problems(0))
    sums = rollout_sums(rollouts, scored, differ(scored.compared), objective.discriminative)
    if scored.metrics is not None:  # the functions of a rank may log others than those of the next
        sums |= logged_sums(scored.metrics, dist.names_of_all(scored.metrics))
    rollouts = replace(rollouts, texts=None)
    if config.zero_std != "keep":
        rollouts, scored = keep_groups(rollouts, scored)
    if config.zero_std == "resample":
        rollouts, scored, sums["resampled"] = resample_groups(rollouts, scored, sampled, problems, config, dist)
    for finished in written:
        sums |= {name: sums.get(name, 0.0) + x for name, x in finished.sums.items()}
    rollouts = compute_rollout_advantages(rollouts, scored, config, dist)
    train_mask = rollouts.train_mask
    sums |= {"advantage": (rollouts.advantage * train_mask).sum(), "advantage_tokens": train_mask.sum(),
             f"{NONFINITE}rewards": sum(bad)}
    timer.end("advantage")
    if scored_before(config):
        rollouts, more = with_old_logp(policy, rollouts, config)
        sums |= more
        timer.end("rescore")
    return Experience(rollouts, sums, times=timer.times, sampled=taken)


def scored_before(config):
    """Whether the policy scores rollouts before the first step on them: for several steps, or importance weights."""
    return config.ppo_epochs * config.minibatches > 1 or config.importance != "none"


def with_old_logp(policy, rollouts, config):
    """The rollouts with old_logp of the policy as it is before their first step, so that the first ratio is exactly 1
    whoever wrote them, and with importance weights for the difference from the sampler's; and sums of metrics."""
    logp = score_in_batches(policy, rollouts, config)
    sums = mismatch(logp, rollouts)
    if config.importance != "none":
        rollouts, more = with_importance(rollouts, logp, config)
        sums |= more
    return replace(rollouts, old_logp=logp), sums


def collect_rollouts(policy, reference, write, config, timer):
    """Phase 1: completions of a batch of problems, a Finished that write() returns, with what the reference says about
    them."""
    finished = write()
    timer.end("collect")
    if reference is not None:
        rollouts = with_reference(finished.rollouts, reference, choose_estimator(config, policy), config)
        finished = replace(finished, rollouts=rollouts)
        timer.end("reference")
    return finished


def compute_rewards(rewards, rollouts, config, kl_beta):
    """Phase 2: a Scored, with the penalties that the config adds in its credit and its values."""
    scored, extra = rewards(rollouts), {}
    credit = scored.credit                                                           # (P, G, 1 or M)
    if config.overlong_buffer:
        length = rollouts.mask.sum(1)                                                # (N,)
        extra["overlong"] = config.overlong_penalty * overlong(length, rollouts.max_tokens, config.overlong_buffer)
        credit = credit + extra["overlong"].view(*credit.shape[:2], 1)
    if config.kl_in_reward and rollouts.ref_logp is not None:
        per_token = kl_as_reward(rollouts, kl_beta)                                  # (N, M)
        extra["kl"] = per_token.sum(1)
        credit = credit + (per_token if credit.shape[2] > 1 else extra["kl"]).view(credit.shape)
    return replace(scored, credit=credit, values=scored.values | extra)


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


def resample_groups(rollouts, scored, sampled, problems, config, dist):
    """Dynamic sampling (arXiv 2503.14476 section 3.2): other problems in place of the groups that were dropped.

    sampled: batch, again -> (rollouts, Scored). At most MOST_RESAMPLES rounds; every rank takes part in each until none
    misses a group. Returns rollouts, Scored, and how many problems were sampled in addition.
    """
    wanted, resampled = config.batch_size * config.gradient_accumulation_steps, 0.0
    for again in range(1, MOST_RESAMPLES + 1):
        missing = wanted - rollouts.problems
        if not int(dist.total(torch.tensor(missing, device=dist.device))):
            break
        if missing:
            resampled += missing
            more = keep_groups(*sampled({key: x[:missing] for key, x in problems(again).items()}, again))
            rollouts, scored = join_rollouts([rollouts, more[0]]), type(scored).join([scored, more[1]])
            check_rollouts(rollouts, config)
    return rollouts, scored, resampled


def train_on_experience(policy, experience, optimizers, lr, config, dist, kl_beta):
    """Phase 4: one optimizer step on this rank's share. Returns the metrics as floats.

    The backward pass runs in micro-batches. The weights are those of the whole step over all ranks, so that neither the
    cut nor the number of ranks changes the gradient.
    """
    rollouts = experience.rollouts
    train_mask = rollouts.train_mask                                                 # (N, M)
    weight = token_weights(train_mask, OBJECTIVES[config.objective].average, rollouts.max_tokens, dist.total)
    problems = torch.arange(rollouts.problems)
    has_reference = rollouts.ref_logp is not None or rollouts.ref_distributions is not None
    learned = train_mask                                                             # (N, M) tokens with a gradient
    if config.entropy_bonus == 0 and (config.kl_in_reward or not has_reference):
        learned = train_mask * (rollouts.advantage != 0)
    if config.entropy_bonus == 0 and not has_reference:  # otherwise the others are read too: their KL is measured
        useful = rollouts.by_problem(learned.any(1)).any(1)                          # (P,)
        problems = problems[useful.cpu()]
    trained = dict.fromkeys(["loss", "pg_loss", "trained_tokens", "entropy", "clip_fraction", "kl_to_old",
                             *["kl", "kl_penalty"] * has_reference], 0.0)
    if experience.on_policy and not scored_before(config):
        trained |= dict.fromkeys(MISMATCH, 0.0) | dict.fromkeys(LARGEST, -math.inf)
    calls = lambda part: policy.calls(rollouts.reading.select(part))
    for part, missing in in_step(rollouts.reading.micro_batches(config, problems), calls, dist):
        loss = policy.idle_loss(missing) if missing else 0.0
        if part is not None:
            micro, rows = rollouts.select(part)
            own, parts = rollout_loss(policy, micro, weight[rows], config, kl_beta, experience.on_policy)
            loss, trained = own + loss if missing else own, add_up(trained, parts)
        loss.backward()
    sums = experience.sums | trained | {"loss_tokens": learned.sum()}
    largest = {name: sums.pop(name) for name in LARGEST if name in sums}
    out = apply_gradients(policy.parameters(), optimizers, lr, config.grad_clip, sums, dist, "loss_tokens",
                          largest=largest, deciding=DECIDING)
    bad = not all(math.isfinite(out[name]) for name in experience.sums if name in DECIDING)
    metrics = finish_metrics(out)
    if config.sampler != "local" and config.fill_estimator == "trajectory":  # the others estimate that probability
        check_mismatch(metrics, config.sampler)
    return metrics | {"lr": lr, "bad_rollouts": int(bad or out.get(f"{NONFINITE}rewards", 0) > 0)}


def rollout_loss(policy, rollouts, weight, config, kl_beta, on_policy=True):
    """Loss of a micro-batch of rollouts, and metrics as sums, so that both add up over micro-batches and ranks.

    rollouts: with their advantage; weight: (N, M) from token_weights over the whole step
    on_policy: the policy is as it was when the rollouts came: the ratio is exactly 1; else it is to rollouts.old_logp
    """
    scores = score(policy, rollouts, config.temperature, learn_entropy=config.entropy_bonus > 0)
    old_logp, train_mask = scores.logp.detach() if on_policy else rollouts.old_logp, rollouts.train_mask  # (N, M)
    loss, ratio, sums = policy_loss(scores.logp, old_logp, rollouts.advantage, weight, OBJECTIVES[config.objective],
                                    config.clip_low, config.clip_high, config.clip_cap)
    sums |= {"pg_loss": loss.detach(), "trained_tokens": train_mask.sum(),
             "entropy": (scores.entropy.detach() * train_mask).sum()}
    if on_policy:
        sums |= mismatch(scores.logp, rollouts)
    kl = kl_per_token(scores, rollouts, choose_estimator(config, policy), ratio if config.kl_importance else None)
    if kl is not None:
        penalty = kl_penalty(kl, weight, config, kl_beta)
        loss = loss + penalty
        sums |= {"kl": (kl.detach() * train_mask).sum(), "kl_penalty": penalty.detach()}
    if config.entropy_bonus > 0:
        loss = loss - config.entropy_bonus * torch.where(weight > 0, scores.entropy * weight, 0.0).sum()
    return loss, sums | {"loss": loss.detach()}
