"""Measures time and memory of this training step beside the usual step and TRL's: fill, causal, peer.

python bench/bench.py fill      6 layers x 384, sequence 256, 16 inputs x 8 completions, 30% masked
python bench/bench.py causal    prompts of 256 tokens, read once or again with each completion of 64 tokens
python bench/bench.py peer      TRL and this project in turns (pip install trl accelerate)
python bench/bench.py fill --n_layer=4 --n_embd=128 --block_size=128 --batch_size=16
python bench/bench.py peer --cases=T,S_long --steps=3

fill and causal compare with a step that reads every completion separately. The last line is one JSON object.
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import torch

from bench.peer import PeerConfig, run_peer
from bench.sides import in_turns, problems, record_of, started
from core.config import load_config
from core.distributed import Distributed
from core.errors import UsageError, run_script
from core.judge import calculate_judge_scores
from core.model import GPT, LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, GPTConfig, freeze
from core.settings.setting import Settings
from core.tokenizer import CharTokenizer
from grpo.build import FILL_IN, LEFT_TO_RIGHT, make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.losses import compute_advantages
from grpo.rewards import Scored
from grpo.sampling_settings import SamplingSettings

TOKENIZER = CharTokenizer(stop=True)
MASKED = 0.3     # share of a text to fill in
HEAD_WIDTH = 64


@dataclass(frozen=True)
class BenchConfig(Settings):
    """Sizes of the models and of the one batch on which both sides are measured."""

    n_layer: int = 6  # layers
    n_embd: int = 384  # width of the hidden states; an attention head has 64 of it
    block_size: int = 256  # fill: tokens of a text, 30% of them masked
    batch_size: int = 16  # problems
    group_size: int = 8  # completions of each problem
    prompt_length: int = 256  # causal: tokens of a prompt
    completion_length: int = 64  # causal: largest number of tokens of a completion
    repeats: int = 1  # steps of each side, in turns; the fastest is reported
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, mps
    dtype: str = "float32"  # float32 or bfloat16


class Comparison:
    """The step of this project, shared(), and the usual way to the same gradient, naive(): subclasses define both."""

    def __init__(self, c, mode, length, **settings):
        self.c, self.length = c, length
        self.dist = Distributed(c.device, c.dtype)
        torch.manual_seed(0)
        self.reward = torch.rand(c.batch_size, c.group_size, device=self.dist.device)
        self.advantage = compute_advantages(self.reward[..., None], "group_std").flatten(0, 1)  # (N, 1)
        self.config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, temperature=1.0, top_p=1.0,
                                 grad_clip=0.0, **settings)
        self.settings = SamplingSettings.of(self.config)
        self.reference = None
        kind = LEFT_TO_RIGHT if mode == LANGUAGE_MODEL else FILL_IN
        self.policy = make_policy(kind, self.model(mode), TOKENIZER, self.config, self.dist)

    def model(self, mode):
        sizes = (self.length, self.c.n_layer, max(1, self.c.n_embd // HEAD_WIDTH), self.c.n_embd)
        config = GPTConfig(mode, TOKENIZER.vocab_size, TOKENIZER.base_vocab_size, *sizes)
        return GPT(config).to(self.dist.device)

    def shared(self):
        grpo_training_step(  # without an optimizer the gradient stays
            self.policy, self.reference, self.rewards, lambda again: self.batch, [], 0, self.config, self.dist,
            sample=self.sample)

    def sample(self, problems, again):
        return self.policy.sample(problems, 0, self.settings), {}

    def rewards(self, rollouts):
        return Scored(self.reward)

    def learn_naively(self, logp, target, mask, penalty=0.0):
        """The loss of completions (N, M) with log-probabilities logp (N, M, V), and its backward pass."""
        sampled = logp.gather(-1, target[..., None]).squeeze(-1)                     # (N, M)
        term = penalty - torch.exp(sampled - sampled.detach()) * self.advantage      # (N, M)
        ((term * mask).sum(1) / mask.sum(1)).mean().backward()

    def step(self, side):
        """Takes a step of one side and returns its record."""
        self.policy.model.zero_grad()
        start = started(self.dist.device)
        getattr(self, side)()
        return record_of(start, self.dist.device)

    def gradient(self):
        return torch.cat([p.grad.flatten() for p in self.policy.parameters()]).float().cpu().numpy()


class Causal(Comparison):
    """Causal training: each prompt is read once for its completions (shared), or again with each of them (naive)."""

    def __init__(self, c):
        super().__init__(c, LANGUAGE_MODEL, c.prompt_length + c.completion_length, kl_beta=0.0,
                         max_new_tokens=c.completion_length)
        self.prompts = np.random.default_rng(0).integers(96, size=(c.batch_size, c.prompt_length))
        self.batch = problems(self.prompts)
        self.rollouts, _ = super().sample(self.batch, 0)

    def sample(self, problems, again):
        return self.rollouts, {}  # training alone is compared

    def naive(self):
        model, target = self.policy.model, self.rollouts.target                      # (N, M)
        prompts = torch.from_numpy(self.prompts).to(target.device)
        prompts = prompts.repeat_interleave(self.c.group_size, 0)                    # (N, T)
        texts = torch.cat((prompts, target[:, :-1]), 1)                              # (N, T + M - 1)
        first = prompts.shape[1] - 1                 # the last token of a prompt predicts the first of its completion
        position = torch.arange(first, texts.shape[1], device=target.device).expand_as(target)
        with self.dist.autocast():
            logp = model(texts, position).log_softmax(-1)                            # (N, M, V)
        self.learn_naively(logp, target, self.rollouts.mask)


class Fill(Comparison):
    """A fill-in step: every model reads a text once for its completions (shared), or once for each, with logits at
    every position (naive)."""

    def __init__(self, c):
        super().__init__(c, MASKED_FILL, c.block_size, block_size=c.block_size)
        self.judge = freeze(self.model(SEQUENCE_SCORER))
        self.reference = self.policy.frozen()
        rng = np.random.default_rng(0)
        target = rng.integers(TOKENIZER.base_vocab_size, size=(c.batch_size, c.block_size))
        mask = rng.random(target.shape).argsort(1) < round(MASKED * c.block_size)
        self.batch = {
            "input": np.where(mask, TOKENIZER.mask_token_id, target),
            "target": target,
            "mask": mask,
            "number": np.arange(c.batch_size)}
        self.rollouts, _ = self.sample(self.batch, 0)

    def rewards(self, rollouts):
        with self.dist.autocast():
            calculate_judge_scores(self.judge, torch.stack(rollouts.texts.tokens), TOKENIZER.cls_token_id)
        return super().rewards(rollouts)

    def naive(self):
        policy, reference = self.policy.model, self.reference.model
        texts = torch.stack(self.rollouts.texts.tokens)                              # (N, T)
        inputs = self.rollouts.inputs.texts[:, 0]                                    # (P, T)
        inputs = inputs.repeat_interleave(self.c.group_size, 0)                      # (N, T)
        with self.dist.autocast():
            with torch.no_grad():
                torch.multinomial(policy(inputs).softmax(-1).flatten(0, 1), 1)       # sampling
                ref_logp = reference(inputs).log_softmax(-1)                         # (N, T, V)
                self.judge(texts).sigmoid().mean(1)
            logp = policy(inputs).log_softmax(-1)                                    # (N, T, V)
        kl = (logp.exp() * (logp - ref_logp)).sum(-1)                                # (N, T)
        self.learn_naively(logp, texts, inputs == TOKENIZER.mask_token_id, self.config.kl_beta * kl)


def take_steps(kind, c, side, turn):
    """One side in turns (bench/sides.py), after a step on one problem, which loads kernels."""
    kind(replace(c, batch_size=1)).step(side)
    comparison = kind(c)
    go_on = turn(None)
    while go_on:
        go_on = turn(comparison.step(side) | {"gradient": comparison.gradient()})


def compare(kind, c):
    """Prints the time and the peak memory of both sides, their ratios, and the difference of the gradients."""
    naive, shared = in_turns([(take_steps, kind, c, side) for side in ("naive", "shared")], c.repeats)
    print(f"{kind.__doc__}\n{c}")
    print(f"{'':<24}{'naive':>12}{'shared':>12}{'ratio':>8}")
    result = {}
    for row in ("seconds", "megabytes"):
        a, b = (min(record[row] for record in found) for found in (naive, shared))
        result[f"ratio of {row}"] = round(a / b, 2)
        print(f"{row:<24}{a:>12.5g}{b:>12.5g}{a / b:>8.2f}")
    gradient = naive[0]["gradient"]
    difference = np.linalg.norm(shared[0]["gradient"] - gradient) / np.linalg.norm(gradient)
    print(json.dumps(result | {"relative difference of the gradients": float(difference)}))


BENCHMARKS = {
    "fill": (BenchConfig, partial(compare, Fill)),
    "causal": (BenchConfig, partial(compare, Causal)),
    "peer": (PeerConfig, run_peer)}


def main(argv):
    """Runs the benchmark that the first argument names."""
    if not argv or argv[0] not in BENCHMARKS:
        raise UsageError(f"python bench/bench.py {'|'.join(BENCHMARKS)} [--key=value]")
    config, run = BENCHMARKS[argv[0]]
    run(load_config(config, argv[1:])[0])


if __name__ == "__main__":
    run_script(main)
