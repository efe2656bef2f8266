"""A training step compared with the usual way to take it: sizes, timing, the gradient, the table."""

import dataclasses
import time
from dataclasses import dataclass

import torch

from core.distributed import Distributed
from core.run.memory import memory_in_use
from core.tokenizer import CharTokenizer
from grpo.grpo_training_step import rollout_loss
from grpo.objectives import token_weights

TOKENIZER = CharTokenizer(stop=True)


@dataclass(frozen=True)
class BenchConfig:
    """Sizes of the models and of the one batch on which both sides are measured."""

    # models
    n_layer: int = 6             # layers
    n_head: int = 6              # attention heads
    n_embd: int = 384            # width of the hidden states
    # the batch
    block_size: int = 256        # fill: tokens of a text
    batch_size: int = 16         # problems
    group_size: int = 8          # completions of each problem
    masked: float = 0.3          # fill: masked share of a text
    prompt_length: int = 256     # causal: tokens of a prompt
    completion_length: int = 64  # causal: largest number of tokens of a completion
    vocab_size: int = 151936     # vocabulary: number of tokens
    # measuring
    repeats: int = 3             # timed steps of each side; the fastest is reported
    device: str = "auto"         # auto (cuda, else mps, else cpu), cpu, cuda, mps
    dtype: str = "float32"       # float32 or bfloat16
    side: str = "both"           # both, or one step of naive or shared alone, to measure its peak memory


class Comparison:
    """The step of this project, shared(), and another way to the same gradient, naive().

    A subclass sets policy, config, advantage and rollouts, and defines both sides.
    """

    columns = ("naive", "shared")
    rows = {"time_ratio": ("seconds", {})}  # {entry of the JSON object: (row of the table, arguments of both sides)}

    def __init__(self, c):
        self.c = c
        self.dist = Distributed(c.device, c.dtype)
        torch.manual_seed(0)

    def learn(self, rollouts):
        """Forward and backward pass of the policy on rollouts."""
        self.policy.model.zero_grad()
        weight = token_weights(rollouts.mask, "sequence", self.config.max_new_tokens)
        rollouts = dataclasses.replace(rollouts, advantage=self.advantage)
        loss, *_ = rollout_loss(self.policy, rollouts, weight, self.config)
        loss.backward()

    def gradient(self):
        return torch.cat([p.grad.flatten() for p in self.policy.parameters()])

    def seconds(self, step, **arguments):
        """Time of the fastest step."""
        times = []
        for _ in range(self.c.repeats + 1):
            start = time.perf_counter()
            step(**arguments)
            wait_for_device(self.dist.device)
            times.append(time.perf_counter() - start)
        return min(times[1:])  # the first one is a warmup

    def report(self):
        """Prints rows of the table. Returns entries of the JSON object."""
        result = {}
        for key, (name, arguments) in self.rows.items():
            naive = self.seconds(self.naive, **arguments)
            shared = self.seconds(self.shared, **arguments)
            row(name, naive, shared, 3)
            result[key] = round(naive / shared, 2)
        return result


def row(name, naive, shared, digits):
    ratio = max(naive, shared) / min(naive, shared)
    print(f"{name:<24}{naive:>12.{digits}f}{shared:>12.{digits}f}{ratio:>8.2f}")


def wait_for_device(device):
    """Returns when a GPU has finished: it still computes when a function returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_megabytes(device):
    """Peak memory, on a GPU of what torch allocated, else of the whole process. A megabyte has 2**20 bytes."""
    return memory_in_use(device) * 1e6 / 2**20
