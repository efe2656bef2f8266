"""One GRPO optimizer step, and its phases: collect, reward, advantage, train."""

import time
from dataclasses import replace

import torch

from core.training_step import apply_gradients
from grpo.advantages import compute_advantages
from grpo.objectives import KL_ESTIMATORS, OBJECTIVES, policy_loss, token_weights
from grpo.rollout import collect, join_rollouts
from grpo.scoring import score, with_old_policy, with_reference
from grpo.step_metrics import finish_metrics, rollout_sums


def rollout_loss(policy, rollouts, weight, config, kl_beta, on_policy=True):
    """Loss of some rollouts of a step, and metrics as sums, so that both add up over micro-batches and ranks.

    rollouts: with their advantage; weight: (N, M) from token_weights over the whole step
    on_policy: the policy at hand wrote the rollouts, so the ratio is exactly 1; else it is to rollouts.old_logp
    """
    said, mask = score(policy, rollouts, config.temperature, learn_entropy=config.entropy_bonus > 0), rollouts.mask
    old_logp = said.logp.detach() if on_policy else rollouts.old_logp                # (N, M)
    loss, ratio, sums = policy_loss(said.logp, old_logp, rollouts.advantage, weight, OBJECTIVES[config.objective],
                                    config.clip_low, config.clip_high, config.clip_cap)
    weighted = lambda x: torch.where(weight > 0, x * weight, 0.0).sum()
    sums |= {"pg_loss": loss.detach(), "trained_tokens": mask.sum(), "entropy": (said.entropy.detach() * mask).sum()}
    if on_policy:  # sampler and scorer
        sums |= mismatch(said.logp, rollouts)
    kl = said.kl                                                                     # (N, M)
    if rollouts.ref_logp is not None:
        kl = KL_ESTIMATORS[rollouts.kl_estimator](said.logp, rollouts.ref_logp)
        kl = ratio * kl if config.kl_importance else kl
    if kl is not None:
        penalty = weighted(kl) * (0.0 if config.kl_in_reward else kl_beta)
        loss = loss + penalty
        sums |= {"kl": (kl.detach() * mask).sum(), "kl_penalty": penalty.detach()}
    if config.entropy_bonus > 0:
        loss = loss - config.entropy_bonus * weighted(said.entropy)
    return loss, sums | {"loss": loss.detach()}


def mismatch(logp, rollouts):
    """Sum over tokens of |p - q| / q, p as `logp` (N, M) has it and q as rollouts.old_logp has it, and their number."""
    apart = (logp.detach() - rollouts.old_logp).masked_fill(rollouts.mask == 0, 0.0)
    return {"ratio_minus_one": (apart.clamp(-20, 20).exp() - 1).abs().sum(), "ratio_tokens": rollouts.mask.sum()}


def overlong(length, longest, buffer):
    """The soft punishment of DAPO (arXiv 2503.14476 eq. 13): 0 up to longest - buffer tokens, then down to -1 at
    longest. length: (N,) -> (N,)."""
    return ((longest - buffer - length) / buffer).clamp(-1.0, 0.0)


def collect_rollouts(policy, reference, batch, step, config, tokenizer, dist, autocast):
    """Phase 1: completions of a batch of problems, with what the reference says about them."""
    rollouts = collect(policy, batch, step, config, tokenizer, dist.device, autocast, config.batch_size)
    return with_reference(rollouts, reference, config.temperature, config.batch_size, autocast)


def compute_rewards(rewards, rollouts, config, kl_beta):
    """Phase 2: the reward (P, G), NaN where not scored, the credit (P, G, 1 or M) that advantages are made of, which is
    the reward with the penalties that the config adds, and every part of both, {name: (N,)}.

    rewards: a Rewards, or any rollouts -> the three
    """
    reward, credit, values = rewards(rollouts)
    P, G = reward.shape
    extra = {}
    if config.overlong_buffer and rollouts.truncated is not None:
        length = rollouts.mask.sum(1)                                                # (N,)
        extra["overlong"] = config.overlong_penalty * overlong(length, rollouts.longest, config.overlong_buffer)
        credit = credit + extra["overlong"].view(P, G, 1)
    if config.kl_in_reward and rollouts.ref_logp is not None:  # log(p / p_ref) of what was drawn: KL's own samples
        spent = -kl_beta * (rollouts.old_logp - rollouts.ref_logp).masked_fill(rollouts.mask == 0, 0.0)  # (N, M)
        extra["kl"] = spent.sum(1)
        credit = credit + (spent if credit.shape[2] > 1 else extra["kl"]).view(credit.shape)
    return reward, credit, values | extra


def compute_rollout_advantages(rollouts, reward, credit, config, dist):
    """Phase 3: the rollouts with their advantage, and without the tokens that must not be trained on: of completions
    that no reward scored and, with mask_truncated, of those that ran out of room."""
    scored = (~reward.isnan()).float()                                               # (P, G)
    mask = scored[..., None] * torch.ones_like(credit)                               # (P, G, 1 or M)
    if credit.shape[2] > 1:
        mask = mask * rollouts.mask.view_as(credit)
    name = config.advantage or OBJECTIVES[config.objective].advantage
    advantage = compute_advantages(credit.nan_to_num(0.0), name, mask, dist.total).flatten(0, 1)
    trained = rollouts.mask * scored.view(-1, 1)
    if rollouts.scored is not None:
        trained = trained * rollouts.scored
    if config.mask_truncated and rollouts.truncated is not None:
        trained = trained * ~rollouts.truncated[:, None]
    return replace(rollouts, mask=trained, advantage=advantage)


def differ(reward):
    """(P,) bool: groups whose rewards (P, G), NaN where not scored, are not all equal."""
    seen = ~reward.isnan()
    return reward.masked_fill(~seen, -torch.inf).amax(1) > reward.masked_fill(~seen, torch.inf).amin(1)


def gather_experience(policy, reference, rewards, batch, step, config, tokenizer, dist, dtype=torch.float32,
                      kl_beta=None, spare=None, doing=lambda what: None):
    """Phases 1 to 3 for this rank's share of an iteration: (rollouts with advantage, sums of metrics, seconds).

    spare: round -> as many other problems, for zero_std='resample': groups of equal rewards are replaced, max_resamples
    rounds at most, in which every rank takes part; those left over are dropped
    """
    kl_beta, autocast, clock = config.kl_beta if kl_beta is None else kl_beta, dist.autocast(dtype), time.perf_counter
    times, times_of = {"collect": 0.0, "reward": 0.0}, [clock()]

    def phase(name):
        times_of.append(clock())
        times[name] += times_of[-1] - times_of[-2]

    def sampled(batch):
        doing(f"generating {len(batch['input']) * config.group_size} completions")
        rollouts = collect_rollouts(policy, reference, batch, step, config, tokenizer, dist, autocast)
        phase("collect")
        doing("scoring")
        with autocast:
            scored = compute_rewards(rewards, rollouts, config, kl_beta)
        phase("reward")
        return rollouts, *scored

    rollouts, reward, credit, values = sampled(batch)
    sums = rollout_sums(rollouts, reward, values, differ(reward), OBJECTIVES[config.objective].discriminative)
    if config.zero_std != "keep":
        rollouts, reward, credit = keep_groups(rollouts, reward, credit, differ(reward))
        if config.zero_std == "resample":
            P, sums["resampled"] = len(batch["input"]), 0.0
            for again in range(config.max_resamples):
                missing = P - rollouts.problems
                if not int(dist.total(torch.tensor(missing, device=dist.device))):
                    break
                if missing:
                    sums["resampled"] += missing
                    more = {key: x[:missing] for key, x in spare(again).items()}
                    *new, _ = sampled(more)
                    new = keep_groups(*new, differ(new[1]))
                    rollouts, reward, credit = join_rollouts([(rollouts, reward, credit), new])
    rollouts = compute_rollout_advantages(rollouts, reward, credit, config, dist)
    sums |= {"advantage": (rollouts.advantage * rollouts.mask).sum(), "advantage_tokens": rollouts.mask.sum()}
    if config.ppo_epochs * config.minibatches > 1:
        scored = with_old_policy(rollouts, policy, config.temperature, config.batch_size, autocast)
        sums |= mismatch(scored.old_logp, rollouts)
        rollouts = scored
    phase("collect")
    return replace(rollouts, texts=None), sums, times


def keep_groups(rollouts, reward, credit, useful):
    """Only the groups where useful (P,) is true."""
    kept = useful.nonzero().squeeze(1).cpu()
    return rollouts.select(kept)[0], reward[useful], credit[useful]


def train_on_rollouts(policy, rollouts, sums, optimizers, lr, config, dist, dtype=torch.float32, kl_beta=None, *,
                      on_policy):
    """Phase 4: one optimizer step on rollouts with their advantage, this rank's share. Returns the metrics as floats.

    on_policy: whether the policy is still the one that wrote the rollouts, so that the ratio is exactly 1
    The backward pass runs in micro-batches of config.batch_size problems; weights are those of the whole step over all
    ranks, so neither cut changes the gradient.
    """
    kl_beta = config.kl_beta if kl_beta is None else kl_beta
    weight = token_weights(rollouts.mask, OBJECTIVES[config.objective].average, rollouts.longest, dist.total)
    problems, rescored = torch.arange(rollouts.problems), config.ppo_epochs * config.minibatches > 1
    has_reference = rollouts.ref_logp is not None or rollouts.ref_full is not None
    if not has_reference and config.entropy_bonus == 0:  # an all-zero advantage: nothing to learn, no backward
        useful = (rollouts.advantage != 0).any(1).view(len(problems), config.group_size).any(1)
        problems = problems[useful.cpu()]
    names = ["loss", "pg_loss", "trained_tokens", "entropy", "clip_fraction", "kl_to_old"]
    names += ["ratio_minus_one", "ratio_tokens"] * (on_policy and not rescored) + ["kl", "kl_penalty"] * has_reference
    trained = dict.fromkeys(names, 0.0)
    for part in problems.split(config.batch_size) if len(problems) else ():
        some, kept = rollouts.select(part)
        with dist.autocast(dtype):
            loss, parts = rollout_loss(policy, some, weight[kept], config, kl_beta, on_policy)
        loss.backward()
        trained = {name: trained[name] + parts[name] for name in trained}
    out = apply_gradients(policy, optimizers, lr, config.grad_clip, sums | trained, dist)
    return finish_metrics(out) | {"lr": lr}


def grpo_training_step(policy, reference, rewards, batch, optimizers, lr, step, config, tokenizer, dist,
                       dtype=torch.float32, doing=lambda what: None):
    """One optimizer step of GRPO (arXiv 2402.03300) on the problems of `batch`, this rank's whole share of the step.

    policy, reference (or None): models in eval mode; rewards: a Rewards, or any rollouts -> (reward, credit, values)
    batch: of DatasetConsumer or PromptConsumer, joined over micro-batches; doing: is told what takes the time
    Returns the metrics of docs/metrics.md as floats
    """
    if config.ppo_epochs * config.minibatches > 1 or config.zero_std == "resample":
        raise ValueError("grpo_training_step is one step on one batch; with ppo_epochs, minibatches or "
                         "zero_std='resample' use GRPOTrainer, or gather_experience and train_on_rollouts")
    rollouts, sums, times = gather_experience(policy, reference, rewards, batch, step, config, tokenizer, dist, dtype,
                                              doing=doing)
    doing("training")
    started = time.perf_counter()
    metrics = train_on_rollouts(policy, rollouts, sums, optimizers, lr, config, dist, dtype, on_policy=True)
    times["train"] = time.perf_counter() - started
    return metrics | {f"time/{name}": seconds for name, seconds in times.items()}
