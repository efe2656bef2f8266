"""The work of a training step that several trainers do: its shapes, its lengths, its counted operations."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from grpo.benchmarks.comparison import peak_megabytes, wait_for_device

MEAN_LENGTH = 24  # of completions that end by themselves
LENGTHS = 11      # keeps the draw of lengths apart from that of prompts


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
    def rows(self):
        return self.batch_size * self.group_size

    @property
    def stop_id(self):
        return self.vocab_size - 1

    @property
    def parameters(self):
        """Numbers in the matrices of the layers, which make up most of a model."""
        return 12 * self.n_layer * self.n_embd**2

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

    def describe(self):
        """The work in words."""
        ends = f"at most {self.completion_length}" if self.mixed else self.completion_length
        return (f"{self.n_layer} layers x {self.n_embd}, vocabulary {self.vocab_size}, {self.batch_size} prompts of "
                f"{self.prompt_length} tokens x {self.group_size} completions of {ends} tokens")


S = {"n_layer": 6, "n_head": 6, "n_embd": 384}
LONG = {"prompt_length": 256, "mixed": True}
CASES = {"T": Work(), "S": Work(**S), "T_mixed": Work(mixed=True), "S_mixed": Work(**S, mixed=True),
         "T_long": Work(**LONG), "S_long": Work(**S, **LONG)}


def gpt2(transformers, work):
    """A random GPT-2 of this size, without dropout, the same in every process."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=work.vocab_size, n_positions=work.prompt_length + work.completion_length, n_layer=work.n_layer,
        n_head=work.n_head, n_embd=work.n_embd, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None,
        eos_token_id=work.stop_id, pad_token_id=work.stop_id))


def counted_operations(work, lengths):
    """Additions and multiplications of a step in matrix products and attention, if every token is read once by each of
    sampling, the reference and training, whose backward pass counts twice.

    lengths: (P, G). A prompt is read once for its group, and the last token of a completion not at all.
    """
    T = work.prompt_length
    read = lengths - 1                                                               # (P, G)
    tokens = len(lengths) * T + read.sum()
    pairs = len(lengths) * T * (T + 1) / 2 + (read * T + read * (read + 1) / 2).sum()  # a token and one that it reads
    products = 2 * (work.parameters * tokens + work.n_embd * work.vocab_size * lengths.sum())
    return 5 * (products + 4 * work.n_layer * work.n_embd * pairs)


def record_of(generation, reference, start, device):
    """The record of a step that began at `start`: seconds of its phases; the rest is training."""
    wait_for_device(device)
    step = time.perf_counter() - start
    return {"generation": generation, "reference": reference, "training": step - generation - reference, "step": step,
            "megabytes": peak_megabytes(device)}


def share_of_letter(completions):
    """The reward of the work: the share of the letter a in each completion."""
    return [text.count("a") / max(1, len(text)) for text in completions]


def check_lengths(lengths, work, step, numbers=slice(None)):
    """Raises AssertionError unless completions ended at the lengths that were drawn for these problems."""
    lengths, drawn = list(lengths), work.lengths(step)[numbers].flatten().tolist()
    assert lengths == drawn, f"lengths {lengths} are not those that were drawn, {drawn}"


def check_names(key, names, known):
    """Raises ValueError if one of the names, separated by commas, is not known."""
    for name in names.split(","):
        if name not in known:
            raise ValueError(f"{key}: {name!r} is not one of {', '.join(known)}")


def matmul_peak(device="cpu", dtype=torch.float32, size=2048, repeats=20):
    """Operations per second of the fastest of several large matrix products."""
    a = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        a @ a
        wait_for_device(a.device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds[1:])  # the first one is a warmup
