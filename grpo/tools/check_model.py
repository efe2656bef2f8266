"""Checks that a generator computes the same in every way that training uses it: one row of a table for each model.

python grpo/tools/check_model.py FOLDER [FOLDER ...] [--key=value]
python grpo/tools/check_model.py hf:owner/name --prompt_length=200 --completion_length=50

FOLDER is what generator_checkpoint may be: a folder in Hugging Face format, hf:owner/name, or a file of this project.
The texts are random tokens. In float32 every number should be about 1e-5 or less. Columns:

sampler      largest difference of a token's log-probability: as it was sampled, token by token through the cache and
             behind padding, or where its text is read at once and alone
shared       relative difference of the gradient: what a group shares is read once, or again for each completion
recomputed   the same, with activations computed again (grad_checkpoint)

The first ratio and the first KL of a run: grpo/train_grpo.py --doctor=True.
"""

import os
import sys
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy as np
import torch

from core.config import UsageError, load_config
from core.distributed import Distributed
from core.distributions import sampling_logp, token_logp
from core.model import LANGUAGE_MODEL
from core.models import load_tokenizer
from core.settings.ranges import check_ranges
from core.settings.script import run_script
from grpo.build import load_policy
from grpo.grpo_config import GRPOConfig
from grpo.scoring import score

COLUMNS = ("sampler", "shared", "recomputed")
PROMPTS, GROUP, SEED = 4, 4, 1337  # random texts, completions of each
RANGES = {"prompt_length": "[2, 1e6]", "completion_length": "[1, 1e6]"}


@dataclass(frozen=True)
class CheckConfig:
    """Sizes of the random texts on which a model is checked."""

    prompt_length: int = 12      # tokens of a prompt of a causal model, or of a text with hidden tokens
    completion_length: int = 8   # tokens of a completion
    device: str = "auto"         # auto (cuda, else mps, else cpu), cpu, cuda, mps
    dtype: str = "float32"       # float32 or bfloat16

    def __post_init__(self):
        check_ranges(self, RANGES)


def random_problems(vocab_size, length):
    """Problems for both kinds of generator: texts of which every third token is sampled, or prompts behind padding."""
    tokens = np.random.default_rng(SEED).integers(vocab_size, size=(PROMPTS, length))
    mask = np.zeros_like(tokens, dtype=bool)
    mask[:, ::3] = True
    return {
        "number": np.arange(PROMPTS),
        "input": tokens,
        "target": tokens,
        "mask": mask,
        "padding": np.arange(PROMPTS) % (length - 1),
        "record": [{"text": ""}] * PROMPTS}


def read_alone(policy, problems, rollouts):
    """The log-probabilities (N, M) of the sampled tokens, of which every text is read at once and alone."""
    place = rollouts.texts.place                                                     # (N, M)
    if policy.model.mode == LANGUAGE_MODEL:  # the token before predicts
        texts, place = rollouts.texts.tokens, place - 1
    else:
        texts = torch.from_numpy(problems["input"]).to(place.device).repeat_interleave(GROUP, 0)  # (N, T)
    with policy.autocast():
        logits = [policy.model(text[None], at[None].clamp(max=len(text) - 1))
                  for text, at in zip(texts, place, strict=True)]
    return token_logp(sampling_logp(torch.cat(logits), 1.0), rollouts.target)


def check(path, c, dist):
    """The numbers of the columns for the generator of this path, and its kind."""
    config = GRPOConfig(generator_checkpoint=path, batch_size=PROMPTS, group_size=GROUP, block_size=c.prompt_length,
                        max_new_tokens=c.completion_length, temperature=1.0, top_p=1.0, seed=SEED)
    tokenizer = load_tokenizer(path, "FOLDER")
    policy = load_policy("generator_checkpoint", config, tokenizer, dist)
    model = policy.model
    problems = random_problems(tokenizer.base_vocab_size, c.prompt_length)
    rollouts = policy.sample(problems, 0, config)
    generator = torch.Generator().manual_seed(SEED)
    weight = torch.randn(rollouts.mask.shape, generator=generator).to(dist.device) * rollouts.mask  # (N, M)

    def gradient(logp):
        """The gradient of the weighted sum of log-probabilities (N, M), flattened."""
        model.zero_grad()
        (logp * weight).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    logp = read_alone(policy, problems, rollouts)
    numbers = [((logp.detach() - rollouts.old_logp) * rollouts.mask).abs().max()]
    expected = gradient(logp)
    for checkpointed in (False, True):
        model.grad_checkpoint = checkpointed
        found = gradient(score(policy, rollouts, config.temperature).logp)
        numbers.append((found - expected).norm() / expected.norm())
    kind = "causal" if model.mode == LANGUAGE_MODEL else "fill-in"
    return [float(x) for x in numbers], kind


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
        numbers, kind = check(path, c, dist)
        print(f"| {path} | {kind} | {' | '.join(f'{x:.1e}' for x in numbers)} |", flush=True)


if __name__ == "__main__":
    run_script(main)
