"""The memory that a run needs, estimated before anything is allocated; a run that cannot fit is refused."""

import torch

from core.distributions import LOGITS_AT_ONCE
from core.model import LANGUAGE_MODEL
from core.run.memory import memory_in_use, memory_limit
from grpo.kl import choose_estimator

MARGIN = 1.5    # the estimate is this close to what is measured, so a run that needs more by this factor cannot fit
# Bytes that a layer keeps for the backward pass, for each token, unit of width and byte of a number: arXiv 2205.05198,
# section 4.1, without attention scores
KEPT = 34 / 2
STORED = 64     # bytes that rollouts store for a sampled token: its id, probability and mask, and the lists of its text
NOISE = 2 * 8   # bytes of the random numbers that a token is drawn with
SETTINGS = {"training": ("batch_size", "group_size", "unmask_steps", "max_new_tokens"),
            "logits": ("batch_size", "group_size"),
            "sampling": ("group_size", "batch_size", "unmask_steps", "max_new_tokens"),
            "evaluation": ("eval_completions", "eval_problems"),
            "stored distributions": ("group_size", "batch_size")}  # what each part grows with


def memory_estimate(config, models, data, dist):
    """{part of the memory: megabytes} at the moment when most is needed.

    Training, sampling and evaluation follow one after the other, so only the largest of them is a part.
    """
    size = 2 if dist.dtype == torch.bfloat16 else 4
    model = models.policy.model
    kind = Prompts if model.mode == LANGUAGE_MODEL else FillIn
    texts = kind(config, data, model, size)
    phases = {"training": training(config, texts, model, size),
              "sampling": texts.reading(config.batch_size, config.group_size) + sampled(config) * texts.completion,
              "evaluation": evaluation(config, texts)}
    phase = max(phases, key=phases.get)
    rows = config.batch_size * config.group_size * texts.new
    weights, optimizer = of_models(models, dist, size)
    found = {"weights": weights, "gradients and optimizer": optimizer, phase: phases[phase],
             "logits": 4 * 4 * min(LOGITS_AT_ONCE, rows * model.vocabulary)}
    if models.reference is not None and choose_estimator(config, models.policy) == "exact":
        states = config.batch_size * config.gradient_accumulation_steps * models.policy.stored_states(config)
        found["stored distributions"] = 4 * states * models.policy.vocabulary
    return {part: bytes / 1e6 for part, bytes in found.items()}


def of_models(models, dist, size):
    """(bytes of all weights, bytes of the gradients and moments of those that are trained). size: bytes of a number"""
    weights = {id(p): p for part in vars(models).values() if part is not None for p in part.model.parameters()}
    trained = sum(p.numel() for p in weights.values() if p.requires_grad)
    ranks = dist.world if dist.sharded else 1
    whole = size if ranks > 1 else 0  # sharded models are put together to sample completions
    return sum(p.numel() * (p.element_size() / ranks + whole) for p in weights.values()), 12 * trained / ranks


def sampled(config):
    """Completions of an iteration on one rank."""
    return config.batch_size * config.gradient_accumulation_steps * config.group_size


def training(config, texts, model, size):
    """Bytes of the rollouts, and of a micro-batch's activations."""
    read = texts.tokens(config.batch_size)
    if config.micro_batch_tokens is not None:  # a problem is never cut
        of_iteration = read * config.gradient_accumulation_steps
        read = min(of_iteration, max(config.micro_batch_tokens, texts.tokens(1)))
    layers, width, _ = model.dimensions
    if config.grad_checkpoint:
        activations = 2 * texts.layer + layers * size * width
    else:
        activations = (layers + 1) * texts.layer
    return sampled(config) * texts.new * STORED + read * activations


def evaluation(config, texts):
    """Bytes of an evaluation, which samples about as many completions at a time as a step."""
    at_once = max(1, config.batch_size * config.group_size // config.eval_completions)
    at_once = min(at_once, config.eval_problems)
    return texts.reading(at_once, config.eval_completions) + at_once * config.eval_completions * texts.completion


class Prompts:
    """Sizes of prompts and their completions.

    new: sampled tokens of a completion; completion: bytes for each one that is sampled, without what the model keeps;
    layer: bytes that a layer keeps for each token
    """

    def __init__(self, config, data, model, size):
        _, width, cached = model.dimensions
        self.longest, self.new, self.group_size = data.longest, config.max_new_tokens, config.group_size
        self.size, self.layer, self.cached = size, KEPT * size * width, cached * size
        self.completion = (NOISE + STORED) * self.new

    def tokens(self, problems):
        """Tokens that are read in training."""
        return problems * (self.longest + self.group_size * self.new)

    def reading(self, problems, group):
        """Bytes of the model while it samples: the cache, the prompts, and the mask of attention between their tokens,
        in bool and as numbers."""
        cache = problems * group * (self.longest + self.new) * self.cached
        prompts = problems * self.longest * (self.cached + self.layer)
        return cache + prompts + problems * self.longest**2 * (1 + self.size)


class FillIn:
    """Sizes of texts with hidden tokens; as for Prompts."""

    def __init__(self, config, data, model, size):
        _, width, _ = model.dimensions
        self.config, self.length, self.layer = config, config.block_size, KEPT * size * width
        self.new = max(1, round(config.mask_high * config.block_size))
        noise = NOISE
        if config.unmask_steps > 1 or config.fill_estimator not in ("trajectory", "one_step"):
            noise = NOISE * (4 + config.unmask_steps)  # also the order of the passes, and the text of each
        self.completion = (noise + STORED) * self.length

    def tokens(self, problems):
        """Tokens that are read in training."""
        G = self.config.group_size
        texts = {"trajectory": 1 + (self.config.unmask_steps - 1) * G, "random_mask": G, "coupled": 2 * G}
        return problems * texts.get(self.config.fill_estimator, 1) * self.length

    def reading(self, problems, group):
        """Bytes of the model while it samples, and of a judge while it scores."""
        texts = problems if self.config.unmask_steps == 1 else problems * group
        return texts * self.length * self.layer


def check_fits(config, models, data, dist):
    """Raises ValueError for a run that needs far more memory than there is, naming what needs the most."""
    megabytes, limit = memory_estimate(config, models, data, dist), memory_limit(dist.device)
    needed = sum(megabytes.values())
    if limit is None or needed <= MARGIN * limit:
        return
    largest = max(megabytes, key=megabytes.get)
    remedy = "take a smaller model, or train an adapter with lora_rank=16"
    if largest in SETTINGS:
        other_kind = "unmask_steps" if models.policy.model.mode == LANGUAGE_MODEL else "max_new_tokens"
        keys = [key for key in SETTINGS[largest] if key != other_kind]
        remedy = "lower " + ", ".join(f"{key}={getattr(config, key)}" for key in keys)
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
    besides = max(0.0, (memory_in_use(dist.device) or 0.0) - megabytes["weights"])
    return f"{line}; besides {besides:.0f} MB of Python, its packages and the data"
