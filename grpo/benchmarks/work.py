"""The work of a training step that several trainers do: its shapes, its lengths, its counted operations."""

import resource
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.benchmark import Timer

MEAN_LENGTH = 24  # of completions that end by themselves
LENGTHS = 11      # keeps the draw of lengths apart from that of prompts
SIDE = 2048       # of the large matrices


@dataclass(frozen=True)
class Work:
    """One step: batch_size prompts, group_size completions of each, a KL penalty to a reference, one update of a causal
    model of GPT-2's shape."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    vocab_size: int = 128        # the last id ends a completion
    batch_size: int = 8          # prompts
    group_size: int = 8          # completions of each
    prompt_length: int = 32
    completion_length: int = 64  # tokens of a completion, at most
    mixed: bool = False          # completions end at lengths drawn from a geometric distribution of mean MEAN_LENGTH

    @property
    def stop_id(self):
        return self.vocab_size - 1

    def prompts(self, step):
        """(P, T) token ids of a step's prompts."""
        return np.random.default_rng(step).integers(self.stop_id, size=(self.batch_size, self.prompt_length))

    def lengths(self, step):
        """(P, G) number of tokens of each completion of a step, the one that ends it included."""
        shape = (self.batch_size, self.group_size)
        if not self.mixed:
            return np.full(shape, self.completion_length)
        drawn = np.random.default_rng([LENGTHS, step]).geometric(1 / MEAN_LENGTH, shape)
        return drawn.clip(max=self.completion_length)


S = {"n_layer": 6, "n_head": 6, "n_embd": 384}
LONG = {"prompt_length": 256, "mixed": True}
CASES = {
    "T": Work(),
    "S": Work(**S),
    "T_mixed": Work(mixed=True),
    "S_mixed": Work(**S, mixed=True),
    "T_long": Work(**LONG),
    "S_long": Work(**S, **LONG)}


def problems(prompts):
    """Prompts (P, T) of one length as problems of core/prompts.py: PromptConsumer."""
    P = len(prompts)
    return {
        "input": prompts,
        "padding": np.zeros(P, dtype=np.int64),
        "number": np.arange(P),
        "record": [{"text": "a", "prompt": "a"}] * P}


def gpt2(transformers, work):
    """A random GPT-2 of this size, without dropout, the same in every process."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=work.vocab_size, n_positions=work.prompt_length + work.completion_length, n_layer=work.n_layer,
        n_head=work.n_head, n_embd=work.n_embd, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
        eos_token_id=None))


def counted_operations(work, lengths):
    """Additions and multiplications of a step in matrix products and attention, if every token is read once by each of
    sampling, the reference and training, whose backward pass counts twice.

    lengths: (P, G). A prompt is read once for its group, and the last token of a completion not at all.
    """
    T = work.prompt_length
    read = lengths - 1                                                               # (P, G)
    tokens = len(lengths) * T + read.sum()
    pairs = len(lengths) * T * (T + 1) / 2 + (read * T + read * (read + 1) / 2).sum()  # a token and one that it reads
    layers = 12 * work.n_layer * work.n_embd**2 * tokens
    logits = work.n_embd * work.vocab_size * lengths.sum()
    attention = 2 * work.n_layer * work.n_embd * pairs
    return 5 * 2 * (layers + logits + attention)


def memory_in_use(device):
    """The most megabytes that this process has needed so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    if sys.platform == "linux":  # of this program alone; resource counts the process that started it too
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def record_of(start, device):
    """The record of a step that began at `start`."""
    wait_for_device(device)
    return {"seconds": time.perf_counter() - start, "megabytes": memory_in_use(device)}


def share_of_letter(completions):
    """The reward of the work: the share of the letter a in each completion."""
    return [text.count("a") / max(1, len(text)) for text in completions]


def check_lengths(lengths, work, step):
    """Raises AssertionError unless completions ended at the lengths that were drawn for the step."""
    lengths, drawn = list(lengths), work.lengths(step).flatten().tolist()
    assert lengths == drawn, f"lengths {lengths} are not those that were drawn, {drawn}"


def wait_for_device(device):
    """Returns when a GPU has finished: it still computes when a function returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def matmul_peak(device, dtype):
    """Operations per second of the fastest of several large matrix products."""
    a = torch.ones(SIDE, SIDE, device=device, dtype=dtype)
    timer = Timer("a @ a", globals={"a": a}, num_threads=torch.get_num_threads())
    return 2 * SIDE**3 / min(timer.timeit(1).mean for _ in range(20))
