"""The memory that a run needs, estimated before anything is allocated; a run that cannot fit is refused."""

import math

import torch

from core.distributions import LOGITS_AT_ONCE
from core.model import LANGUAGE_MODEL
from core.prompts import PromptConsumer
from core.run.memory import memory_in_use, memory_limit
from grpo.kl import choose_estimator

MARGIN = 1.5    # the estimate is this close to what is measured, so a run that needs more by this factor cannot fit
# Bytes that a layer keeps for the backward pass, for each token, unit of width and byte of a number: arXiv 2205.05198,
# section 4.1, without attention scores
KEPT = 34 / 2
STORED = 80     # bytes of a token that may be sampled: id, probability, mask, noise, and the lists of its text


def memory_estimate(config, models, data, dist):
    """{part of the memory: megabytes} at the moment when most is needed.

    Training and sampling follow one after the other, so only the larger of them is a part. An evaluation samples about
    as many completions at a time as a step, and at least those of a problem.
    """
    policy = models.policy
    size = 2 if dist.dtype == torch.bfloat16 else 4                   # bytes of a number
    problems = config.batch_size * config.gradient_accumulation_steps
    new = config.max_new_tokens                                       # the most sampled tokens of a completion
    if policy.model.mode != LANGUAGE_MODEL and not isinstance(data, PromptConsumer):
        new = max(1, round(config.mask_high * config.block_size))
    of_step = sampling(config, policy.model, data, size, config.batch_size, config.group_size)
    of_evaluation = sampling(config, policy.model, data, size, 1, config.eval_completions)
    phases = {
        "training": training(config, policy.model, data, size),
        "sampling": max(of_step, of_evaluation)}
    phase = max(phases, key=phases.get)
    weights, optimizer = of_models(models, dist, size)
    drawn = config.group_size * new
    logits = min(LOGITS_AT_ONCE, config.batch_size * drawn * policy.vocabulary)
    found = {
        "weights": weights,
        "gradients and optimizer": optimizer,
        phase: STORED * problems * drawn + phases[phase],
        "logits": 4 * 4 * logits}
    if models.reference is not None and choose_estimator(config, policy) == "exact":
        found["stored distributions"] = 4 * problems * policy.stored_states(config) * policy.vocabulary
    return {part: bytes / 1e6 for part, bytes in found.items()}


def of_models(models, dist, size):
    """(bytes of all weights, bytes of the gradients and moments of those that are trained). size: bytes of a number"""
    parts = [part.model for part in vars(models).values() if part is not None]
    weights = {id(p): p for model in parts for p in model.parameters()}
    trained = sum(p.numel() for p in weights.values() if p.requires_grad)
    ranks = dist.world if dist.shards else 1
    whole = size if ranks > 1 else 0  # sharded models are put together to sample completions
    stored = sum(p.numel() * (p.element_size() / ranks + whole) for p in weights.values())
    return stored, 12 * trained / ranks


def training(config, model, data, size):
    """Bytes that a micro-batch keeps for the backward pass."""
    G = config.group_size
    if model.mode == LANGUAGE_MODEL:
        of_problem = data.longest + G * config.max_new_tokens
    else:
        blocks, length = blocks_and_length(config, data)
        texts = {
            "trajectory": 1 + (blocks * config.unmask_steps - 1) * G,
            "agrpo": config.passes_read * G,
            "step_merge": 1 + (config.passes_read - 1) * G}
        of_problem = texts.get(config.fill_estimator, 1) * length
    tokens = config.batch_size * of_problem
    if config.micro_batch_tokens is not None:  # a problem is never cut
        of_iteration = tokens * config.gradient_accumulation_steps
        tokens = min(of_iteration, max(config.micro_batch_tokens, of_problem))
    layers, width, _ = model.dimensions
    if config.grad_checkpoint:
        return tokens * (2 * KEPT + layers) * size * width
    return tokens * (layers + 1) * KEPT * size * width


def sampling(config, model, data, size, problems, group):
    """Bytes of the model while it samples `group` completions of each problem, and of a judge while it scores."""
    _, width, cached = model.dimensions
    layer = KEPT * size * width
    if model.mode != LANGUAGE_MODEL:
        blocks, length = blocks_and_length(config, data)
        texts = problems if blocks * config.unmask_steps == 1 else problems * group
        return texts * length * layer
    T = data.longest
    cache = (T + group * (T + config.max_new_tokens)) * cached * size
    attention = T**2 * (1 + size)  # which tokens of a prompt see which others, in bool and as numbers
    return problems * (cache + T * layer + attention)


def blocks_and_length(config, data):
    """(number of blocks, tokens) of a text that a masked-fill model reads: a window, or a prompt and its completion."""
    if not isinstance(data, PromptConsumer):
        return 1, config.block_size
    blocks = math.ceil(config.max_new_tokens / (config.block_length or config.max_new_tokens))
    return blocks, data.longest + config.max_new_tokens


def check_fits(config, models, data, dist):
    """Raises ValueError for a run, not a dry one, that needs far more memory than there is, naming what needs most."""
    megabytes = memory_estimate(config, models, data, dist)
    limit = memory_limit(dist.device)
    needed = sum(megabytes.values())
    if config.dry_run or limit is None or needed <= MARGIN * limit:
        return
    largest = max(megabytes, key=megabytes.get)
    length = "max_new_tokens" if models.policy.model.mode == LANGUAGE_MODEL else "unmask_steps"
    keys = ["batch_size", "group_size", length]
    if largest == "sampling":
        keys.append("eval_completions")
    remedy = "lower " + ", ".join(f"{key}={getattr(config, key)}" for key in keys)
    if largest in ("weights", "gradients and optimizer"):
        remedy = "take a smaller model, or train an adapter with lora_rank=16"
    raise ValueError(f"the run needs about {needed:,.0f} MB, but {dist.device} has {limit:,.0f}: most of it, "
                     f"{megabytes[largest]:,.0f} MB, is for {largest}; {remedy}")


def describe_memory(config, models, data, dist):
    """A line for the start of a run: the memory that it needs, by part."""
    megabytes = memory_estimate(config, models, data, dist)
    parts = ", ".join(f"{name} {size:.0f}" for name, size in megabytes.items())
    line = f"on {dist.device} in {dist.dtype}; about {sum(megabytes.values()):.0f} MB: {parts}"
    if dist.device.type != "cpu":
        return line
    # On a CPU the process has needed memory for Python, its packages and the data besides its weights
    in_use = memory_in_use(dist.device) or 0.0
    besides = max(0.0, in_use - megabytes["weights"])
    return f"{line}; besides {besides:.0f} MB of Python, its packages and the data"
