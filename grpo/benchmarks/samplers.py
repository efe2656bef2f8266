"""Throughput with a sampler elsewhere that takes as long as training: in turns, or one iteration ahead."""

import json
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from core.distributed import Distributed
from core.model import GPT, LANGUAGE_MODEL, GPTConfig
from core.training_step import build_optimizers
from grpo.benchmarks.comparison import TOKENIZER
from grpo.build import make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import grpo_training_step
from grpo.rewards import Scored
from grpo.samplers.ahead import Ahead
from grpo.samplers.sampler import Finished


@dataclass(frozen=True)
class SamplersConfig:
    """Sizes of the step, and how slow the sampler is."""

    slowness: float = 1.0        # time of writing the completions of an iteration, in times of training on them
    iterations: int = 8          # timed ones of each side; before them, one is not counted
    most_ahead: int = 2          # max_staleness is measured from 0 to this
    n_layer: int = 2             # layers
    n_head: int = 2              # attention heads
    n_embd: int = 64             # width of the hidden states
    batch_size: int = 8          # problems
    group_size: int = 8          # completions of each
    prompt_length: int = 32      # tokens of a prompt
    completion_length: int = 64  # tokens of a completion, at most
    device: str = "cpu"          # auto (cuda, else mps, else cpu), cpu, cuda, mps


class SleepingSampler:
    """Stands for a sampler on other machines: it needs `seconds` for each start, one after another, and nothing of this
    one. Its completions were written before."""

    outside = True

    def __init__(self, rollouts, seconds):
        self.rollouts, self.seconds, self.waiting, self.free = rollouts, seconds, deque(), 0.0

    def start(self, problems, iteration, version):
        self.free = max(self.free, time.perf_counter()) + self.seconds
        self.waiting.append((self.free, version))

    def finish(self):
        until, version = self.waiting.popleft()
        time.sleep(max(0.0, until - time.perf_counter()))
        return Finished(self.rollouts, version)

    def sync(self, weights, version):
        """The completions do not depend on weights."""

    def score(self, problems, written):
        return lambda: []

    def close(self):
        self.waiting.clear()


class Steps:
    """A policy with its problems, and whole optimizer steps on completions that a sampler brings."""

    def __init__(self, c):
        self.c, self.dist = c, Distributed(c.device, "float32")
        torch.manual_seed(0)
        model = GPT(GPTConfig(LANGUAGE_MODEL, TOKENIZER.vocab_size, TOKENIZER.base_vocab_size,
                              c.prompt_length + c.completion_length, c.n_layer, c.n_head, c.n_embd))
        self.config = self.settings(0)
        self.policy = make_policy(model.to(self.dist.device), TOKENIZER, self.config, self.dist)
        self.optimizers = build_optimizers(self.policy, self.config)
        prompts = np.random.default_rng(0).integers(96, size=(c.batch_size, c.prompt_length))
        self.problems = {"input": prompts, "padding": np.zeros(c.batch_size, dtype=np.int64),
                         "number": np.arange(c.batch_size), "record": np.array([None] * c.batch_size)}
        self.reward = torch.rand(c.batch_size, c.group_size, device=self.dist.device)
        self.rollouts = self.policy.sample(self.problems, 0, self.config)

    def settings(self, ahead):
        c = self.c
        return GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, temperature=1.0, top_p=1.0, kl_beta=0.0,
                          max_new_tokens=c.completion_length, max_staleness=ahead)

    def seconds(self, ahead, slow):
        """Mean seconds of an iteration with a sampler that takes `slow` seconds, up to `ahead` iterations ahead."""
        config, start = self.settings(ahead), None
        written = Ahead(SleepingSampler(self.rollouts, slow), self.policy, lambda iteration: self.problems, config)
        for i in range(self.c.iterations + 1):
            if i == 1:  # the first iteration is a warmup
                start = time.perf_counter()
            grpo_training_step(
                self.policy, None, lambda rollouts: Scored(self.reward), lambda again: self.problems, self.optimizers,
                1e-5, i, config, self.dist, take=lambda batch, again: written.take(batch, i, again, self.c.iterations))
        if self.dist.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / self.c.iterations


def run_samplers(c):
    """Prints seconds and tokens per second for every max_staleness, and a JSON object of the ratios."""
    steps = Steps(c)
    train = [steps.seconds(0, 0.0) for _ in range(2)][-1]
    slow, tokens, result = train * c.slowness, int(steps.rollouts.mask.sum()), {}
    print(f"{c.n_layer} layers x {c.n_embd}, {c.batch_size} x {c.group_size} completions, {tokens} tokens, "
          f"{steps.dist.device}; training {train:.3f} s, sampling {slow:.3f} s (simulated)")
    print(f"{'max_staleness':<16}{'seconds':>10}{'tokens per second':>20}{'times as fast':>16}")
    for ahead in range(c.most_ahead + 1):
        seconds = steps.seconds(ahead, slow)
        before = seconds if ahead == 0 else before
        result[f"ratio_{ahead}"] = round(before / seconds, 2)
        print(f"{ahead:<16}{seconds:>10.3f}{tokens / seconds:>20.0f}{before / seconds:>16.2f}")
    print(json.dumps(result))
