"""A training step compared with the usual way to take it: sizes, both sides in turns, the gradient, the table."""

import json
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from core.distributed import Distributed
from core.run.memory import memory_in_use
from core.tokenizer import CharTokenizer
from grpo.advantages import compute_advantages
from grpo.benchmarks.side import Side, in_turns
from grpo.grpo_training_step import rollout_loss
from grpo.objectives import token_weights

TOKENIZER = CharTokenizer(stop=True)
ROWS = {"seconds": "time_ratio", "seconds, no judge": "time_ratio_without_judge", "peak MB": "memory_ratio"}


@dataclass(frozen=True)
class BenchConfig:
    """Sizes of the models and of the one batch on which both sides are measured."""

    # models
    n_layer: int = 6             # layers
    n_head: int = 6              # attention heads
    n_embd: int = 384            # width of the hidden states
    # the batch
    block_size: int = 256        # fill, checkpoint: tokens of a text, 30% of them masked
    batch_size: int = 16         # problems
    group_size: int = 8          # completions of each problem
    prompt_length: int = 256     # causal: tokens of a prompt
    completion_length: int = 64  # causal: largest number of tokens of a completion
    # measuring
    repeats: int = 1             # steps of each side, in turns; the fastest is reported
    device: str = "auto"         # auto (cuda, else mps, else cpu), cpu, cuda, mps
    dtype: str = "float32"       # float32 or bfloat16


class Comparison:
    """The step of this project, shared(), and another way to the same gradient, naive().

    A subclass sets policy and config and defines both sides, which return the seconds of a judge, or None.
    """

    columns = ("naive", "shared")

    def __init__(self, c):
        self.c = c
        self.dist = Distributed(c.device, c.dtype)
        torch.manual_seed(0)
        reward = torch.rand(c.batch_size, c.group_size, device=self.dist.device)
        self.advantage = compute_advantages(reward, "group_std").view(-1, 1)         # (N, 1)

    def learn(self, rollouts):
        """Forward and backward pass of the policy on rollouts."""
        weight = token_weights(rollouts.mask, "sequence", self.config.max_new_tokens)
        loss, *_ = rollout_loss(self.policy, replace(rollouts, advantage=self.advantage), weight, self.config)
        loss.backward()

    def step(self, side):
        """Takes a step of one side. Returns the rows that it fills of the table."""
        self.policy.model.zero_grad()
        start = time.perf_counter()
        judge = self.shared() if side == "shared" else self.naive()
        wait_for_device(self.dist.device)
        rows = {"seconds": time.perf_counter() - start, "peak MB": peak_megabytes(self.dist.device)}
        if judge is not None:
            rows["seconds, no judge"] = rows["seconds"] - judge
        return rows

    def gradient(self):
        return torch.cat([p.grad.flatten() for p in self.policy.parameters()]).float().cpu().numpy()


def take_steps(kind, c, side, turn):
    """One side in turns (grpo/benchmarks/side.py), after a step on one problem, which loads kernels."""
    kind(replace(c, batch_size=1)).step(side)
    comparison = kind(c)
    go_on = turn(None)
    while go_on:
        go_on = turn(comparison.step(side) | {"gradient": comparison.gradient()})


def compare(kind, c):
    """Prints the time and the peak memory of both sides, each in a process of its own, their ratios, and the difference
    of the gradients."""
    measured = in_turns({side: [Side(take_steps, kind, c, side)] for side in ("naive", "shared")}, 0, c.repeats)
    naive, shared = ([record for record, in found] for found in measured.values())
    print(f"{kind.__doc__}\n{c}")
    print(f"{'':<24}{kind.columns[0]:>12}{kind.columns[1]:>12}{'ratio':>8}")
    result = {}
    for row, key in ROWS.items():
        if row in naive[0]:
            a, b = (min(record[row] for record in records) for records in (naive, shared))
            print(f"{row:<24}{a:>12.5g}{b:>12.5g}{a / b:>8.2f}")
            result[key] = round(a / b, 2)
    wanted = naive[0]["gradient"]
    result["gradient_difference"] = float(np.linalg.norm(shared[0]["gradient"] - wanted) / np.linalg.norm(wanted))
    print(f"relative difference of the gradients {result['gradient_difference']:.1e}\n{json.dumps(result)}")


def wait_for_device(device):
    """Returns when a GPU has finished: it still computes when a function returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_megabytes(device):
    """Peak memory, on a GPU of what torch allocated, else of the whole process. A megabyte has 2**20 bytes."""
    return memory_in_use(device) * 1e6 / 2**20
