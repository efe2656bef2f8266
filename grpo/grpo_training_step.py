"""The algorithm: one GRPO optimizer step, and its phases: collect, reward, advantage, train."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.distributed import Distributed
from core.errors import Mistake
from core.optim import clip_gradients, step_optimizers
from core.settings.setting import Settings
from grpo.losses import compute_advantages, k3, kl_penalty, kl_per_token, policy_loss, token_weights
from grpo.metrics import Timer, add_mismatch, add_rollouts, add_effective_sample_size, add_varied, check_mismatch
from grpo.reference import logp_in_batches, with_reference
from grpo.rollout import DataBuffer, Facts, Rollouts, Scored, Scores
from grpo.sampling_settings import SamplingSettings
from grpo.shaping import drop_equal, resample_equal
from grpo.step_settings import StepSettings
from grpo.sums import Sums

if TYPE_CHECKING:
    from grpo.policies.policy import Policy

# If one of these metrics is not finite, all steps on the rollouts are skipped
FINITE_IN_ROLLOUTS = ("mean_reward", "mean_log_prob", "mean_advantage")
# If one of these is not finite, the step is skipped
FINITE_IN_STEP = ("loss", "grad_norm", *FINITE_IN_ROLLOUTS)
# Internal sums from which end_step derives the outcome of a step
GROUPS_THAT_DIFFER = "groups that differ"
WITH_ADVANTAGE = "tokens with an advantage"
WITH_GRADIENT = "tokens with a gradient"


def grpo_training_step(
        policy: "Policy",
        reference: "Policy | None",
        rewards: Callable,
        problems: Callable,
        optimizers: list,
        iteration: int,
        config: Settings,
        dist: Distributed,
        buffer: DataBuffer | None = None,
        sample: Callable | None = None,
        settings: StepSettings | None = None,
        timer: Timer | None = None,
        note: Callable | None = None) -> dict:
    """One optimizer step of GRPO (arXiv 2402.03300). The first step of an iteration fills the buffer with rollouts, and
    every step trains on a minibatch of it: one of `minibatches` parts, in each of `ppo_epochs` passes.

    policy, reference: policies, None without a KL; rewards: a Rewards, or any function rollouts -> Scored
    problems: a function of the round `again` that returns this rank's problems: in round 0 the problems of the
        iteration, in rounds 1, 2, ... other problems to replace groups of equal rewards
    iteration: number of the round of rollouts; the sampling noise depends on it
    buffer: the DataBuffer of the run, the same in every step; None: a single step on rollouts of its own
    sample: (problems, again) -> (Rollouts, {metric: (sum, count)}), the sampler; None: the policy
    settings: StepSettings of the config, so that a caller makes them only once; timer: the clock of the phases
    note: called with the rollouts of an iteration and their Scored, before groups are dropped; None: nothing is
    Returns the metrics by their names in docs/metrics.md, and text_tokens
    """
    settings = settings or StepSettings.of(config, policy)
    timer = timer or Timer()
    warn_about_unused_settings(reference, buffer, settings, config)
    if buffer is None:
        buffer = DataBuffer(config.seed, dist.rank)
        settings = replace(settings, epochs=1, minibatches=1)

    is_first = not buffer.queue
    if is_first:
        sample = sample or sample_by(policy, iteration, config)
        with dist.gathered():  # a sharded model is whole while it samples and scores
            rollouts, sums = collect_rollouts(
                policy, reference, rewards, problems, sample, settings, dist, timer, note)
        rollout_id = buffer.store_rollout_data(rollouts, sums)
        buffer.prepare_training_batch(rollout_id, settings.epochs, settings.minibatches)

    timer.begin("train")
    rollouts, sums = buffer.next_minibatch()
    if is_first and settings.ratio_to == "policy":
        rollouts = replace(rollouts, proximal_logp=None)  # the policy has not moved: the ratio is exactly 1
    metrics, facts = train_on_rollouts(policy, rollouts, sums, optimizers, settings, dist, is_first)
    timer.end()
    buffer.facts = facts
    if not facts.scored or not all_finite(metrics, FINITE_IN_ROLLOUTS):
        buffer.release()  # the other steps on these rollouts would teach nothing either
    return metrics | timer.times


def warn_about_unused_settings(
        reference: "Policy | None",
        buffer: DataBuffer | None,
        settings: StepSettings,
        config: Settings) -> None:
    """Warns a caller from Python about settings that have no effect without a buffer or a reference."""
    if buffer is None and settings.steps > 1:
        warnings.warn(f"ppo_epochs={settings.epochs} minibatches={settings.minibatches} have no effect: without a "
                      "buffer the step has rollouts of its own; hand every step the same buffer, "
                      "DataBuffer(config.seed, dist.rank)", stacklevel=3)
    if reference is None and settings.kl_beta > 0 and config.reference_mode != "none":
        warnings.warn(f"kl_beta={settings.kl_beta} has no effect without a reference; hand one over, such as "
                      "policy.frozen(), or set kl_beta=0.0", stacklevel=3)


def sample_by(policy: "Policy", iteration: int, config: Settings) -> Callable:
    """Returns the default `sample` of grpo_training_step: the policy itself samples."""
    settings = SamplingSettings.of(config)

    def sample(problems, again):
        return policy.sample(problems, iteration, settings), {}
    return sample


def collect_rollouts(
        policy: "Policy",
        reference: "Policy | None",
        rewards: Callable,
        problems: Callable,
        sample: Callable,
        settings: StepSettings,
        dist: Distributed,
        timer: Timer,
        note: Callable | None = None) -> tuple[Rollouts, Sums]:
    """Phases 1 to 3 for this rank's share of an iteration. Arguments: as grpo_training_step

    Returns the rollouts with their advantage, and the sums of their metrics
    """
    objective = settings.objective
    sums = Sums()

    def sample_and_reward(again, count=None):
        """Phases 1 and 2 of one round, for all its problems or the first `count`. Returns rollouts and their Scored."""
        timer.begin("collect")
        wanted = {}
        for name, column in problems(again).items():
            wanted[name] = column[:count]
        rollouts, measured = sample(wanted, again)
        for name, (total, number) in measured.items():
            sums.sampled(name, total, number)

        timer.begin("reference")
        rollouts = with_reference(rollouts, reference, settings)

        timer.begin("reward")
        scored = rewards(rollouts)
        check_scored(scored, rollouts)
        if objective.advantage != "step":  # "step" compares across groups, so equal rewards in a group are no problem
            add_varied(sums, scored)
        for shape in settings.shapes:
            rollouts, scored = shape(rollouts, scored, rewards)
        sums.internal(GROUPS_THAT_DIFFER, scored.differ().sum())
        timer.begin("advantage")
        return rollouts, scored

    rollouts, scored = sample_and_reward(0)
    if note is not None:
        note(rollouts, scored)
    add_rollouts(sums, rollouts, scored, objective.discriminative)
    if settings.zero_std == "drop":
        rollouts, scored = drop_equal(rollouts, scored)
    elif settings.zero_std == "resample":
        rollouts, scored = resample_equal(rollouts, scored, sample_and_reward, dist, sums)

    rollouts = with_advantage(rollouts, scored, objective.advantage, dist)
    trained = rollouts.train_mask                                                    # (N, M)
    advantage = rollouts.advantage * trained                                         # (N, M)
    sums.mean("mean_advantage", advantage.sum(), trained.sum())
    taught = (rollouts.advantage != 0) * trained                                     # (N, M)
    sums.internal(WITH_ADVANTAGE, taught.sum())

    # The ratio is to the proximal policy (arXiv 2110.00641): the sampler, or the policy before its first step on the
    # rollouts. With a single step the latter is the current policy, so the loss has its log-probabilities already
    if settings.ratio_to == "sampler":
        rollouts = replace(rollouts, proximal_logp=rollouts.old_logp)
    elif settings.steps > 1:
        timer.begin("rescore")
        logp = logp_in_batches(policy, rollouts, settings)                           # (N, M)
        rollouts = replace(rollouts, proximal_logp=logp)
        add_mismatch(sums, logp, rollouts)
    return replace(rollouts, texts=None), sums  # only rewards read the texts


def check_scored(scored: Scored, rollouts: Rollouts) -> None:
    """Raises Mistake unless there is a reward for each completion of each problem."""
    shape = rollouts.problems, rollouts.group_size
    if not isinstance(scored, Scored) or scored.reward.shape != shape:
        raise Mistake(f"rewards must return a Scored whose reward is a tensor (problems, group_size) = {shape}; "
                      "rollouts.by_problem makes it of one number for each completion")


def with_advantage(rollouts: Rollouts, scored: Scored, advantage: str, dist: Distributed) -> Rollouts:
    """Phase 3: adds the advantage to the rollouts. Completions that no reward scored leave the train_mask.
    advantage: a name in ADVANTAGES"""
    counted = scored.counted(rollouts.mask)                                          # (P, G, 1 or M)
    credit = scored.credit + scored.penalty                                          # (P, G, 1 or M)
    credit = torch.where(counted > 0, credit, 0.0)  # NaN, where nothing is scored, must not reach the group's mean
    A = compute_advantages(credit, advantage, counted, dist.total)                   # (P, G, 1 or M)
    A = (A * scored.weight).flatten(0, 1)                                            # (N, 1 or M)
    is_scored = ~scored.reward.isnan()                                               # (P, G)
    train_mask = rollouts.train_mask * is_scored.float().view(-1, 1)                 # (N, M)
    return replace(rollouts, train_mask=train_mask, advantage=A)


def train_on_rollouts(
        policy: "Policy",
        rollouts: Rollouts,
        sums: Sums,
        optimizers: list,
        settings: StepSettings,
        dist: Distributed,
        is_first: bool = True) -> tuple[dict, Facts]:
    """Phase 4: one optimizer step on this rank's share. Returns the metrics as floats, and the Facts of the rollouts.

    sums: from collect_rollouts; is_first: no step on these rollouts has changed the policy yet

    The backward pass runs in micro-batches. The token weights are computed over the whole step and all ranks, so that
    neither the size of the micro-batches nor the number of ranks changes the gradient.
    """
    objective = settings.objective
    sums = sums.copy()  # other steps on these rollouts begin with the same sums
    # Metrics of every step, even if no token is trained on
    sums.sum("loss", 0.0)
    sums.sum("pg_loss", 0.0)
    if rollouts.has_reference:
        sums.sum("kl_penalty", 0.0)
    # After the first step the distance to the sampler is training, not a mismatch
    measure_mismatch = is_first and not sums.has_mean("mismatch_kl")

    weight = token_weights(rollouts.train_mask, objective.average, rollouts.max_tokens, dist.total)
    problems, learned = problems_to_read(rollouts, settings)
    parts = rollouts.micro_batches(settings.batch_size, settings.micro_batch_tokens, problems)
    # All ranks must call a sharded model equally often, because each call gathers its layers from all ranks
    for part in dist.micro_batches(parts, policy, rollouts):
        micro, rows = rollouts.select(part)
        scores = policy.score(micro, settings.temperature, objective.entropy_bonus > 0)
        loss = rollout_loss(scores, micro, weight[rows], settings, sums)
        if measure_mismatch:
            add_mismatch(sums, scores.logp, micro)
        dist.backward(loss)
    sums.internal(WITH_GRADIENT, learned.sum())
    return end_step(policy, optimizers, sums, settings, dist)


def problems_to_read(rollouts: Rollouts, settings: StepSettings) -> tuple:
    """The indices of the problems that the loss or its metrics must read, and (N, M) 1.0 where a token has a gradient.

    Without entropy bonus and KL in the loss, advantages of 0 give no gradient. With a reference the KL of all problems
    is measured, so all are read.
    """
    problems = torch.arange(rollouts.problems)
    learned = rollouts.train_mask                                                    # (N, M)
    has_penalty = settings.kl_beta > 0 and rollouts.has_reference
    if has_penalty or settings.objective.entropy_bonus > 0:
        return problems, learned
    learned = learned * (rollouts.advantage != 0)
    if rollouts.has_reference:
        return problems, learned
    useful = rollouts.by_problem(learned.any(1)).any(1)                              # (P,)
    return problems[useful.cpu()], learned


def rollout_loss(
        scores: Scores,      # of the policy
        rollouts: Rollouts,  # with their advantage
        weight: Tensor,      # (N, M) from token_weights over the whole step
        settings: StepSettings,
        sums: Sums) -> Tensor:
    """The loss of a micro-batch of rollouts. Its metrics are added to sums."""
    objective = settings.objective
    counted = rollouts.train_mask                                                    # (N, M)
    tokens = counted.sum()
    old_logp = rollouts.proximal_logp
    if old_logp is None:
        old_logp = scores.logp.detach()

    loss, ratio, clipped = policy_loss(scores.logp, old_logp, rollouts.advantage, weight, objective)
    sums.sum("pg_loss", loss.detach())
    sums.mean("clip_fraction", clipped.sum(), tokens)
    kl_to_old = k3(old_logp, scores.logp.detach())                                   # (N, M) KL(old policy || policy)
    kl_to_old = torch.where(weight > 0, kl_to_old, 0.0)
    sums.mean("kl_to_old", kl_to_old.sum(), tokens)
    entropy = scores.entropy.detach() * counted                                      # (N, M)
    sums.mean("entropy", entropy.sum(), tokens)

    kl = kl_per_token(scores, rollouts, settings.kl_estimator, ratio)
    if kl is not None:
        penalty = kl_penalty(kl, weight, settings.kl_beta)
        loss = loss + penalty
        measured = kl.detach() * counted                                             # (N, M)
        sums.mean("mean_kl", measured.sum(), tokens)
        sums.sum("kl_penalty", penalty.detach())

    if objective.entropy_bonus > 0:
        bonus = torch.where(weight > 0, scores.entropy * weight, 0.0)                # (N, M)
        loss = loss - objective.entropy_bonus * bonus.sum()
    sums.sum("loss", loss.detach())
    return loss


def end_step(
        policy: "Policy",
        optimizers: list,
        sums: Sums,
        settings: StepSettings,
        dist: Distributed) -> tuple[dict, Facts]:
    """Adds up the sums and gradients of all ranks, clips, and steps or skips. Waits for the device once."""
    dist.sum_gradients(policy.parameters())
    norm = clip_gradients(policy.parameters(), settings.grad_clip)
    sums.highest("grad_norm", norm)  # the same on every rank
    values = sums.values(dist)
    metrics, internal = values.metrics, values.internal
    add_effective_sample_size(values)
    for name, completions in values.skipped.items():
        values.add_metric(f"skipped/{name}", completions)

    is_finite = all_finite(metrics, FINITE_IN_STEP)
    outcome = step_optimizers(optimizers, is_finite, internal[WITH_GRADIENT])
    for name, value in outcome.items():
        values.add_metric(name, value)
    if settings.sampler is not None:
        check_mismatch(metrics, settings.sampler)

    # mean_reward is from the first round: if it is missing, a completion of a later round may still be scored
    taught = internal.get(WITH_ADVANTAGE, 0.0) != 0
    facts = Facts(
        scored="mean_reward" in metrics or taught,
        taught=taught,
        differed=internal.get(GROUPS_THAT_DIFFER, 1.0) > 0,
        varied=values.varied,
        skipped=values.skipped)
    return metrics, facts


def all_finite(metrics: dict, names: Sequence[str]) -> bool:
    """True if none of these metrics is infinite or NaN. A missing metric counts as finite."""
    measured = [metrics[name] for name in names if name in metrics]
    return all(map(math.isfinite, measured))
