"""What a run needs in memory, estimated before anything is allocated; a run that cannot fit is refused."""

import torch

from core.distributions import LOGITS_AT_ONCE
from core.model import LANGUAGE_MODEL
from core.run.memory import memory_in_use, memory_limit
from grpo.kl import choose_estimator

MARGIN = 1.5    # the estimate is this close to what is measured, so a run that needs more by this factor cannot fit
# Bytes that a layer keeps for the backward pass, for each token, unit of width and byte of a number: arXiv 2205.05198,
# section 4.1, without attention scores
KEPT = 34 / 2
OF_TOKEN = 64   # bytes that are stored of a sampled token: its id, probability and mask, and the lists of its text
SETTINGS = {"training": ("batch_size", "group_size", "unmask_steps", "max_new_tokens"),
            "logits": ("batch_size", "group_size"),
            "sampling": ("group_size", "batch_size", "unmask_steps", "max_new_tokens"),
            "evaluation": ("eval_completions", "eval_problems"),
            "stored distributions": ("group_size", "batch_size")}  # what each part grows with


def memory_estimate(config, models, data, dist):
    """{what for: megabytes} at the moment when most is needed. Of training, sampling and evaluation, which need it one
    after the other, the largest."""
    found = {**of_models(models, dist), **of_phases(config, models, data, dist)}
    if models.reference is not None and choose_estimator(config, models.policy) == "exact":
        states = config.batch_size * config.gradient_accumulation_steps * models.policy.stored_states(config)
        found["stored distributions"] = 4 * states * models.policy.vocabulary
    return {name: x / 1e6 for name, x in found.items()}


def of_models(models, dist):
    """Bytes of all weights, and of the gradients and moments of those that are trained."""
    size = 2 if dist.dtype == torch.bfloat16 else 4
    weights = {id(p): p for part in vars(models).values() if part is not None for p in part.model.parameters()}
    trained = sum(p.numel() for p in weights.values() if p.requires_grad)
    ranks = dist.world if dist.sharded else 1  # models are put together to write completions
    whole = size if ranks > 1 else 0
    return {"weights": sum(p.numel() * (p.element_size() / ranks + whole) for p in weights.values()),
            "gradients and optimizer": 12 * trained / ranks}


def of_phases(config, models, data, dist):
    """Bytes of the phase of a step that needs the most, and of the logits in it."""
    model, size = models.policy.model, 2 if dist.dtype == torch.bfloat16 else 4
    kind = Prompts if model.mode == LANGUAGE_MODEL else FillIn
    layers, width, _ = model.dimensions
    text = kind(config, data, model, size)

    read, problem = text.tokens(config.batch_size), text.tokens(1)
    if config.micro_batch_tokens is not None:  # a problem is never cut
        read = min(read * config.gradient_accumulation_steps, max(config.micro_batch_tokens, problem))
    kept_layers = 1 if config.grad_checkpoint else layers
    inputs = layers if config.grad_checkpoint else 0
    layer = KEPT * size * width
    training = read * (layer * (kept_layers + 1) + inputs * size * width)
    if not config.like_lengths:
        training += text.masks(config.batch_size) * kept_layers
    problems = config.batch_size * config.gradient_accumulation_steps
    stored = problems * config.group_size * text.new * OF_TOKEN
    at_once = min(text.evaluated_at_once(), config.eval_problems)
    phases = {"training": stored + training,
              "sampling": stored + text.sampling(config.batch_size, problems, config.group_size),
              "evaluation": text.sampling(at_once, at_once, config.eval_completions) + text.evaluation()}
    phase = max(phases, key=phases.get)
    logits = min(LOGITS_AT_ONCE, config.batch_size * config.group_size * text.new * model.vocabulary)
    return {phase: phases[phase], "logits": 4 * 4 * logits}


class Prompts:
    """Bytes for prompts and their completions."""

    def __init__(self, config, data, model, size):
        self.config, self.longest, self.new, self.size = config, data.longest, config.max_new_tokens, size
        _, self.width, self.cached = model.dimensions

    def tokens(self, problems):
        """How many are read in training."""
        return problems * (self.longest + self.config.group_size * self.new)

    def masks(self, problems):
        """The mask of attention between all tokens of prompts that are read together, in bool and as numbers."""
        return problems * self.longest**2 * (1 + self.size)

    def sampling(self, problems, of_step, group):
        """Writing `group` completions of so many prompts at a time; the noise is that of the whole step."""
        cache = problems * group * (self.longest + self.new) * self.cached * self.size
        prompt = problems * self.longest * (self.cached + KEPT * self.width) * self.size
        noise = 2 * 8 * of_step * group * self.new
        return cache + prompt + noise + self.masks(problems) + problems * group * self.new * OF_TOKEN

    def evaluated_at_once(self):
        """How many problems an evaluation samples for at a time."""
        return max(1, self.config.batch_size * self.config.group_size // self.config.eval_completions)

    def evaluation(self):
        """What an evaluation keeps beside what it samples."""
        return 0


class FillIn:
    """Bytes for texts with hidden tokens."""

    def __init__(self, config, data, model, size):
        self.config, self.length, self.size = config, config.block_size, size
        _, self.width, _ = model.dimensions
        self.new = max(1, round(config.mask_high * config.block_size))

    def tokens(self, problems):
        """How many are read in training."""
        G, passes = self.config.group_size, self.config.unmask_steps
        texts = {"trajectory": 1 + (passes - 1) * G, "random_mask": G, "coupled": 2 * G}
        return problems * texts.get(self.config.fill_estimator, 1) * self.length

    def masks(self, problems):
        """Fill-in models read without a mask of attention."""
        return 0

    def sampling(self, problems, of_step, group):
        """Filling in so many texts at a time, and what a judge keeps of a layer; the noise and the texts that the
        passes read are those of the whole step."""
        passes = self.config.unmask_steps
        one_pass = passes == 1 and self.config.fill_estimator in ("trajectory", "one_step")
        noise = 2 * 8 * of_step * group * self.length * (1 if one_pass else 4)
        texts = 0 if one_pass else 2 * 8 * of_step * group * passes * self.length
        read = problems * (1 if passes == 1 else group) * self.length
        return noise + texts + read * KEPT * self.size * self.width + of_step * group * self.length * OF_TOKEN

    def evaluated_at_once(self):
        """How many problems an evaluation samples for at a time."""
        return self.config.batch_size

    def evaluation(self):
        """Its problems, drawn at the start: input, target and mask."""
        return 4 * 8 * self.config.eval_problems * self.length


def check_fits(config, models, data, dist):
    """Raises ValueError for a run that needs far more memory than there is, naming what needs the most."""
    megabytes, limit = memory_estimate(config, models, data, dist), memory_limit(dist.device)
    needed, largest = sum(megabytes.values()), max(megabytes, key=megabytes.get)
    if limit is not None and needed > MARGIN * limit:
        remedy = "take a smaller model, or train an adapter with lora_rank=16"
        if largest in SETTINGS:
            other_kind = "unmask_steps" if models.policy.model.mode == LANGUAGE_MODEL else "max_new_tokens"
            keys = [key for key in SETTINGS[largest] if key != other_kind]
            remedy = "lower " + ", ".join(f"{key}={getattr(config, key)}" for key in keys)
        raise ValueError(f"the run needs about {needed:,.0f} MB, but {dist.device} has {limit:,.0f}: most of it, "
                         f"{megabytes[largest]:,.0f} MB, is for {largest}; {remedy}")


def describe_memory(config, models, data, dist):
    """A line for the start of a run: what it needs, and beside what."""
    megabytes = memory_estimate(config, models, data, dist)
    line = (f"on {dist.device} in {dist.dtype}; about {sum(megabytes.values()):.0f} MB: "
            + ", ".join(f"{name} {size:.0f}" for name, size in megabytes.items()))
    if dist.device.type != "cpu":
        return line
    return f"{line}; beside {process_alone(megabytes, dist.device):.0f} MB of Python, its packages and the data"


def process_alone(megabytes, device):
    """Megabytes that the process has needed so far beside its weights: on a CPU Python, its packages and the data."""
    return max(0.0, (memory_in_use(device) or 0.0) - megabytes["weights"])
