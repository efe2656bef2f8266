"""What comparisons with the usual step share: sizes, timing, the gradient, the rows of the table."""

import time
from dataclasses import dataclass

import torch

from core.tokenizer import CharTokenizer

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


class Bench:
    """What the benchmarks share: timing, and the gradient for comparison."""

    columns = ("naive", "shared")

    def gradient(self):
        return torch.cat([p.grad.flatten() for p in self.policy.parameters()])

    def seconds(self, step, *arguments):
        times = []
        for _ in range(self.c.repeats + 1):  # the first is a warmup and is not counted
            start = time.perf_counter()
            step(*arguments)
            if self.dist.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])


def row(name, naive, shared, digits):
    print(f"{name:<24}{naive:>12.{digits}f}{shared:>12.{digits}f}{max(naive, shared) / min(naive, shared):>8.2f}")
