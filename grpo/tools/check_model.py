"""Whether a generator computes the same in every way that training uses it: one row of a table for each model.

python grpo/tools/check_model.py FOLDER [FOLDER ...] [--key=value]
python grpo/tools/check_model.py hf:owner/name --prompt_length=200 --completion_length=50

FOLDER is what generator_checkpoint may be: a folder in Hugging Face format, hf:owner/name, or a file of this project.
The texts are random tokens. In float32 every number should be about 1e-5 or less. Columns:

cache        largest difference of a logit: tokens read one by one through the cache, or all at once (causal)
padding      largest difference of a logit: with columns of padding on the left, or without (causal)
shared       relative difference of the gradient: what a group shares is read once, or again for each completion
recomputed   relative difference of the gradient: activations computed again (grad_checkpoint), or stored
first ratio  largest |ratio - 1| at the first step
first KL     largest KL of a token to the reference at step 0
sampler      largest difference of a token's log-probability: as it was sampled, or as training scores it
"""

import copy
import os
import sys
from dataclasses import dataclass, replace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy as np
import torch

from core.config import UsageError, load_config
from core.distributed import Distributed
from core.model import LANGUAGE_MODEL
from core.models import load_model, load_tokenizer
from core.settings.ranges import check_ranges
from core.settings.script import run_script
from grpo.build import POLICIES, make_policy
from grpo.grpo_config import GRPOConfig
from grpo.scoring import score, score_in_batches, with_reference

COLUMNS = ("cache", "padding", "shared", "recomputed", "first ratio", "first KL", "sampler")
RANGES = {"batch_size": "[1, 1e6]", "group_size": "[2, 1e6]", "prompt_length": "[2, 1e6]",
          "completion_length": "[1, 1e6]", "masked": "(0, 1]"}


@dataclass(frozen=True)
class CheckConfig:
    """Sizes of the random texts on which a model is checked."""

    # texts
    batch_size: int = 4          # prompts, or texts with hidden tokens
    group_size: int = 4          # completions of each
    prompt_length: int = 12      # tokens of the longest prompt of a causal model, or of a text with hidden tokens
    completion_length: int = 8   # tokens of a completion, at most
    masked: float = 0.3          # hidden share of a text
    seed: int = 1337             # of the random texts
    # system
    device: str = "auto"         # auto (cuda, else mps, else cpu), cpu, cuda, mps
    dtype: str = "float32"       # float32 or bfloat16

    def __post_init__(self):
        check_ranges(self, RANGES)


def random_tokens(tokenizer, c):
    """(batch_size, prompt_length) ids that a text may hold: no end and no special tokens."""
    excluded = {*tokenizer.stop_token_ids, *tokenizer.banned_token_ids}
    allowed = np.array([i for i in range(tokenizer.base_vocab_size) if i not in excluded])
    return np.random.default_rng(c.seed).choice(allowed, size=(c.batch_size, c.prompt_length))


def causal_problems(tokenizer, c):
    """Prompts of different lengths, padded on the left, as PromptConsumer gives them."""
    tokens, numbers = random_tokens(tokenizer, c), np.arange(c.batch_size)
    padding = numbers % (c.prompt_length - 1)                                        # (P,) the shortest has two tokens
    tokens[np.arange(c.prompt_length) < padding[:, None]] = tokenizer.pad_token_id
    records = np.array([{"text": ""}] * c.batch_size)                                # no reward reads them
    return {"input": tokens, "padding": padding, "number": numbers, "record": records}


def fill_problems(tokenizer, c):
    """Texts with hidden tokens, as DatasetConsumer gives them."""
    target, rng = random_tokens(tokenizer, c), np.random.default_rng(c.seed + 1)
    hidden = max(1, round(c.masked * c.prompt_length))
    mask = rng.random(target.shape).argsort(1) < hidden
    return {"input": np.where(mask, tokenizer.mask_token_id, target), "target": target, "mask": mask,
            "number": np.arange(c.batch_size)}


def difference(a, b):
    """The largest difference of two tensors; two infinities of the same sign are equal."""
    return float(torch.where(a == b, 0.0, a - b).abs().max())


@torch.no_grad()
def cache_difference(policy, tokens):
    """Logits of tokens (B, T) read at once against those of a prompt whose continuation is read token by token."""
    model, split = policy.model, tokens.shape[1] // 2
    with policy.autocast():
        past = model.new_cache()
        parts = [model(tokens[:, :split], past=past)]
        past = past.expand(torch.arange(len(tokens), device=tokens.device), room=tokens.shape[1] - split)
        for t in range(split, tokens.shape[1]):
            parts.append(model(tokens[:, t : t + 1], past=past))
        return difference(torch.cat(parts, 1), model(tokens))


@torch.no_grad()
def padding_difference(policy, tokens, filler):
    """Logits of texts of different lengths, padded on the left to one length, against those of each text alone."""
    B, T = tokens.shape
    padding = torch.arange(B) % (T - 1)                                              # (B,)
    texts = [row[: T - n] for row, n in zip(tokens, padding.tolist(), strict=True)]
    wide = torch.full_like(tokens, filler)                                           # (B, T)
    for row, text in zip(wide, texts, strict=True):
        row[T - len(text) :] = text
    with policy.autocast():
        together = policy.model(wide, padding=padding.to(tokens.device))             # (B, T, V)
        return max(difference(logits[T - len(text) :], policy.model(text[None])[0])
                   for logits, text in zip(together, texts, strict=True))


def gradient(policy, rollouts, weight):
    """The gradient of the weighted log-probabilities of the sampled tokens, flattened."""
    for p in policy.parameters():
        p.grad = None
    (score(policy, rollouts, 1.0).logp * weight).sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def read_alone(policy, rollouts):
    """(policy, rollouts) with which every completion reads all of its text itself, with the same gradient."""
    if policy.model.mode == LANGUAGE_MODEL:
        alone = copy.copy(policy)
        alone.shared_prompt = False
        return alone, rollouts
    reading, G = rollouts.reading, rollouts.group_size
    rows = {f.name: getattr(reading, f.name).repeat_interleave(G, 0) for f in reading.fields_by_problem()}
    return policy, replace(rollouts, group_size=1, reading=replace(reading, group_size=1, **rows))


def gradient_differences(policy, rollouts):
    """(shared, recomputed): relative differences to the plain gradient."""
    weight = torch.randn(rollouts.mask.shape, generator=torch.Generator().manual_seed(0)).to(rollouts.mask.device)
    shared = gradient(policy, rollouts, weight)
    plain = gradient(*read_alone(policy, rollouts), weight)
    policy.model.grad_checkpoint = True
    recomputed = gradient(policy, rollouts, weight)
    policy.model.grad_checkpoint = False
    return [float((x - plain).norm() / plain.norm()) for x in (shared, recomputed)]


def check(path, c, dist):
    """{column: number or None where it does not apply} for the generator of this path, and the kind of generator."""
    tokenizer = load_tokenizer(path, "FOLDER")
    model, _ = load_model(path, dist.device, tokenizer=tokenizer, key="FOLDER")
    if model.mode not in POLICIES:
        raise ValueError(f"{path} has mode {model.mode}; name a generator, which completes prompts or fills in texts")
    config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, max_new_tokens=c.completion_length,
                        block_size=c.prompt_length, temperature=1.0, top_p=1.0)
    policy, row = make_policy(model, tokenizer, config, dist), dict.fromkeys(COLUMNS)
    causal = model.mode == LANGUAGE_MODEL
    if causal:
        problems = causal_problems(tokenizer, c)
        tokens = torch.from_numpy(random_tokens(tokenizer, c)).to(dist.device)       # (B, T)
        row["cache"] = cache_difference(policy, tokens)
        row["padding"] = padding_difference(policy, tokens, tokenizer.pad_token_id)
    else:
        problems = fill_problems(tokenizer, c)
    rollouts = policy.sample(problems, 0, config)
    logp = score(policy, rollouts, 1.0).logp.detach()                                # (N, M)
    ratio = (logp - score_in_batches(policy, rollouts, config)).exp()                # (N, M)
    row["first ratio"] = difference(ratio, torch.ones_like(ratio))
    row["sampler"] = difference(logp, rollouts.old_logp)
    with torch.no_grad():
        known = with_reference(rollouts, policy.frozen(), "exact", config)
        row["first KL"] = float(score(policy, known, 1.0).kl.abs().max())
    row["shared"], row["recomputed"] = gradient_differences(policy, rollouts)
    return row, "causal" if causal else "fill-in"


def main(argv):
    """Prints the table, a row as soon as it is known."""
    if {"--help", "-h"} & set(argv):
        print(__doc__.strip(), "", sep="\n")
    settings = [a for a in argv if a.startswith("-") or a.endswith(".py")]
    paths = [a for a in argv if a not in settings]
    c, _ = load_config(CheckConfig, settings)
    if not paths:
        raise UsageError("python grpo/tools/check_model.py FOLDER [FOLDER ...] [--key=value]")
    dist = Distributed(c.device, c.dtype)
    print(f"| model | kind | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
    for path in paths:
        row, kind = check(path, c, dist)
        cells = ["-" if x is None else f"{x:.1e}" for x in row.values()]
        print(f"| {path} | {kind} | {' | '.join(cells)} |", flush=True)
    dist.close()


if __name__ == "__main__":
    run_script(main)
