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

import torch

from core.config import UsageError, load_config
from core.distributed import Distributed
from core.distributions import draw_uniforms, token_logp
from core.fill_in import predict_and_sample_tokens
from core.generation import generate
from core.model import LANGUAGE_MODEL, SEQUENCE_SCORER
from core.models import load_model, load_tokenizer
from core.settings.ranges import check_ranges
from core.settings.script import run_script

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


def never(tokens, first):
    """A rule for the end of completions, as core.generation.Stop: they do not end."""
    return torch.zeros_like(tokens[:, first:], dtype=torch.bool)


def complete(model, prompt, noise):
    """Completes prompts (P, T) of different lengths. Returns the sampled tokens and their log-probabilities, (N, M)
    each, and two functions that read them again, for logits (N, M, V): every text alone, and the prompts once for their
    groups."""
    padding = torch.arange(PROMPTS, device=prompt.device) % (prompt.shape[1] - 1)    # (P,)
    out = generate(model, prompt, padding, noise, never)
    rows = torch.arange(PROMPTS, device=prompt.device).repeat_interleave(GROUP)      # (N,)
    inputs = torch.cat((prompt[rows, -1:], out.target[:, :-1]), 1)                   # (N, M)

    def alone():
        texts = [torch.cat((prompt[row, padding[row] : -1], inputs[n])) for n, row in enumerate(rows.tolist())]
        return torch.cat([model(text[None])[:, -inputs.shape[1] :] for text in texts])

    def shared():
        past = model.new_cache()
        model.states(prompt[:, :-1], past=past, padding=padding)
        return model(inputs, past=past.expand(rows), padding=padding[rows])

    return out.target, out.logp, alone, shared


def fill_in(model, text, noise):
    """The same for texts (P, T), of which every third token is sampled."""
    position = torch.arange(0, text.shape[1], 3, device=text.device).expand(PROMPTS, -1)  # (P, M)
    with torch.no_grad():
        target, logp, _ = predict_and_sample_tokens(model, text, position, noise)    # (P, G, M) each

    def alone():
        return model(text.repeat_interleave(GROUP, 0), position.repeat_interleave(GROUP, 0))

    def shared():
        return model(text, position).repeat_interleave(GROUP, 0)

    return target.flatten(0, 1), logp.flatten(0, 1), alone, shared


def check(path, c, dist):
    """The numbers of the columns for the generator of this path, and its kind."""
    tokenizer = load_tokenizer(path, "FOLDER")
    model, _ = load_model(path, dist.device, tokenizer=tokenizer, key="FOLDER")
    if model.mode == SEQUENCE_SCORER:
        raise ValueError(f"{path} has mode {model.mode}; name a generator, which completes prompts or fills in texts")
    kind, sample, length = "fill-in", fill_in, c.prompt_length
    if model.mode == LANGUAGE_MODEL:
        kind, sample, length = "causal", complete, c.completion_length
    torch.manual_seed(SEED)
    tokens = torch.randint(tokenizer.base_vocab_size, (PROMPTS, c.prompt_length)).to(dist.device)
    with dist.autocast():
        target, logp, alone, shared = sample(model, tokens, draw_uniforms(SEED, 0, range(PROMPTS), (GROUP, length)))
        weight = torch.randn(target.shape).to(dist.device)                           # (N, M)

        def score(read):
            """The log-probabilities (N, M), and the gradient of their weighted sum, flattened."""
            model.zero_grad()
            scored = token_logp(read().log_softmax(-1), target)
            (scored * weight).sum().backward()
            return scored.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

        scored, expected = score(alone)
        numbers = [(scored - logp).abs().max()]
        for checkpointed in (False, True):
            model.grad_checkpoint = checkpointed
            numbers.append((score(shared)[1] - expected).norm() / expected.norm())
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
    dist.close()


if __name__ == "__main__":
    run_script(main)
