"""Time and memory of this training step, compared with one that reads every completion separately.

python grpo/tools/bench.py fill         6 layers x 384, sequence 256, 16 inputs x 8 completions, 30% masked
python grpo/tools/bench.py causal       prompts of 256 tokens, read once or again with each completion of 64 tokens
python grpo/tools/bench.py checkpoint   grad_checkpoint: activations stored, or computed again in the backward pass
python grpo/tools/bench.py vocabulary   a Hugging Face model of 151,936 tokens: logits whole, or in parts
python grpo/tools/bench.py fill --n_layer=4 --n_embd=128 --block_size=128 --batch_size=16

Both sides train on the same completions. The last line is one JSON object.
"""

import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy as np
import torch

from core import distributions
from core.config import UsageError, load_config, run_script
from core.distributed import Distributed
from core.huggingface import HuggingFaceModel
from core.judge import calculate_judge_scores
from core.model import GPT, LANGUAGE_MODEL, MASKED_FILL, SEQUENCE_SCORER, GPTConfig, freeze
from core.optional import require
from core.tokenizer import CharTokenizer
from grpo.advantages import compute_advantages
from grpo.build import make_policy
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import rollout_loss
from grpo.objectives import token_weights
from grpo.scoring import with_reference

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


class Fill(Bench):
    """Fill-in: one forward for the completions of a group (shared), or one for each completion (naive)."""

    def __init__(self, c):
        self.c, self.dist = c, Distributed(c.device, c.dtype)
        torch.manual_seed(0)
        shape = (TOKENIZER.vocab_size, TOKENIZER.base_vocab_size, c.block_size, c.n_layer, c.n_head, c.n_embd)
        model = GPT(GPTConfig(MASKED_FILL, *shape)).to(self.dist.device)
        self.judge = freeze(GPT(GPTConfig(SEQUENCE_SCORER, *shape)).to(self.dist.device))
        self.config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, block_size=c.block_size, top_p=1.0,
                                 temperature=1.0)
        self.policy = make_policy(model, TOKENIZER, self.config, self.dist)
        self.reference = self.policy.frozen()
        rng = np.random.default_rng(0)
        target = rng.integers(TOKENIZER.base_vocab_size, size=(c.batch_size, c.block_size))
        mask = rng.random((c.batch_size, c.block_size)).argsort(1) < round(c.masked * c.block_size)
        self.batch = {"input": np.where(mask, TOKENIZER.mask_token_id, target), "target": target, "mask": mask,
                      "number": np.arange(c.batch_size)}
        self.completions = self.collect()
        reward = torch.rand(c.batch_size, c.group_size, device=self.dist.device)
        self.advantage = compute_advantages(reward, "group_std").view(-1, 1)

    def collect(self):
        rollouts = self.policy.sample(self.batch, 0, self.config)
        return with_reference(rollouts, self.reference, "exact", self.config)

    def shared(self, judged):
        """This project's step, up to the gradient: each model reads an input once."""
        self.policy.model.zero_grad()
        rollouts = self.collect()
        if judged:
            with self.dist.autocast():
                calculate_judge_scores(self.judge, torch.stack(rollouts.texts.tokens), TOKENIZER.cls_token_id)
        weight = token_weights(rollouts.mask, "sequence", self.c.block_size)
        rollouts = dataclasses.replace(rollouts, advantage=self.advantage)
        rollout_loss(self.policy, rollouts, weight, self.config, self.config.kl_beta)[0].backward()

    def report(self):
        """Prints rows of the table. Returns entries of the JSON object."""
        result = {}
        for judged, key in ((True, "time_ratio"), (False, "time_ratio_without_judge")):
            naive, shared = self.seconds(self.naive, judged), self.seconds(self.shared, judged)
            result[key] = round(naive / shared, 2)
            row("seconds, judge" if judged else "seconds, no judge", naive, shared, 3)
        return result

    def naive(self, judged):
        """The usual step: every completion is a row of its own in every model, with logits at every position."""
        done, c, policy, reference = self.completions, self.config, self.policy.model, self.reference.model
        policy.zero_grad()
        texts = torch.stack(done.texts.tokens)                                       # (N, T)
        inputs = done.reading.texts[:, 0].repeat_interleave(c.group_size, 0)         # (N, T)
        masked = inputs == TOKENIZER.mask_token_id                                   # (N, T)
        with self.dist.autocast():
            with torch.no_grad():
                torch.multinomial(policy(inputs).softmax(-1).flatten(0, 1), 1)       # sampling
                ref_logp = reference(inputs).log_softmax(-1)                         # (N, T, V)
                if judged:
                    self.judge(texts).sigmoid().mean(1)
            logp = policy(inputs).log_softmax(-1)                                    # (N, T, V)
        sampled = logp.gather(-1, texts[..., None]).squeeze(-1)                      # (N, T)
        term = -torch.exp(sampled - sampled.detach()) * self.advantage               # (N, T)
        term = term + c.kl_beta * (logp.exp() * (logp - ref_logp)).sum(-1)
        ((term * masked).sum(1) / masked.sum(1)).mean().backward()


class Checkpointed(Fill):
    """The fill-in step without a judge: activations stored for the backward pass (naive) or computed again (shared)."""

    columns = ("stored", "again")

    def naive(self, _):
        self.policy.model.grad_checkpoint = False
        Fill.shared(self, False)

    def shared(self, _):
        self.policy.model.grad_checkpoint = True
        Fill.shared(self, False)

    def report(self):
        """Prints rows of the table. Returns entries of the JSON object."""
        stored, again = self.seconds(self.naive, False), self.seconds(self.shared, False)
        row("seconds", stored, again, 3)
        return {"time_ratio": round(stored / again, 2)}


class Causal(Bench):
    """Causal training: the prompt is read once for its completions (shared), or again with each of them (naive)."""

    def __init__(self, c):
        self.c, self.dist = c, Distributed(c.device, c.dtype)
        torch.manual_seed(0)
        model, tokenizer = self.generator(c.prompt_length + c.completion_length)
        self.config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, temperature=1.0, top_p=1.0,
                                 kl_beta=0.0, max_new_tokens=c.completion_length)
        self.policy = make_policy(model.to(self.dist.device), tokenizer, self.config, self.dist)
        prompts = np.random.default_rng(0).integers(96, size=(c.batch_size, c.prompt_length))
        self.batch = {"input": prompts, "padding": np.zeros(c.batch_size, dtype=np.int64),
                      "number": np.arange(c.batch_size), "record": np.array([None] * c.batch_size)}
        self.rollouts = self.collect()
        reward = torch.rand(c.batch_size, c.group_size, 1, device=self.dist.device)
        self.advantage = compute_advantages(reward, "group_std").view(-1, 1)

    def generator(self, length):
        """(model that reads `length` tokens, its tokenizer)"""
        c = self.c
        return GPT(GPTConfig(LANGUAGE_MODEL, TOKENIZER.vocab_size, TOKENIZER.base_vocab_size, length, c.n_layer,
                             c.n_head, c.n_embd)), TOKENIZER

    def collect(self):
        return self.policy.sample(self.batch, 0, self.config)

    def train(self, shared):
        """Forward and backward pass on the completions. shared: whether their prompt is read once."""
        self.policy.model.zero_grad()
        self.policy.shared_prompt = shared
        weight = token_weights(self.rollouts.mask, "sequence", self.c.completion_length)
        rollouts = dataclasses.replace(self.rollouts, advantage=self.advantage)
        rollout_loss(self.policy, rollouts, weight, self.config, 0.0)[0].backward()

    def naive(self, _):
        self.train(False)

    def shared(self, _):
        self.train(True)

    def report(self):
        """Prints rows of the table. Returns entries of the JSON object."""
        naive, shared = self.seconds(self.train, False), self.seconds(self.train, True)
        writing, tokens = self.seconds(self.collect), float(self.rollouts.mask.sum())
        row("seconds, training", naive, shared, 3)
        row("tokens per second", tokens / naive, tokens / shared, 0)
        print(f"{'generation':<24}{tokens / writing:>24.0f} tokens per second; completions of "
              f"{tokens / len(self.advantage):.0f} tokens")
        return {"time_ratio": round(naive / shared, 2)}


class Vocabulary(Causal):
    """Training of a Hugging Face model with a large vocabulary: all logits at once (whole), or in parts."""

    columns = ("whole", "parts")

    def generator(self, length):
        """A random model of Qwen2's shape. Its tokenizer knows ids only, and nothing ends a completion."""
        transformers, c = require("transformers", "bench.py vocabulary"), self.c
        net = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
            vocab_size=c.vocab_size, hidden_size=c.n_embd, intermediate_size=4 * c.n_embd, num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head, num_key_value_heads=c.n_head, max_position_embeddings=length,
            tie_word_embeddings=True))
        tokenizer = SimpleNamespace(base_vocab_size=c.vocab_size, banned_token_ids=(), stop_token_ids=())
        return HuggingFaceModel(net, tokenizer, LANGUAGE_MODEL), tokenizer

    def train(self, parts):
        """Forward and backward pass on the completions. parts: whether logits are made in parts."""
        usual = distributions.LOGITS_AT_ONCE
        distributions.LOGITS_AT_ONCE = usual if parts else 2**62
        Causal.train(self, True)
        distributions.LOGITS_AT_ONCE = usual


def row(name, naive, shared, digits):
    print(f"{name:<24}{naive:>12.{digits}f}{shared:>12.{digits}f}{max(naive, shared) / min(naive, shared):>8.2f}")


def peak_memory(argv, side):
    """Peak megabytes of a process that runs one step of one side: on a CPU of the whole process, on a GPU of what torch
    allocated."""
    command = [sys.executable, __file__, *argv, f"--side={side}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().split("\n")[-1])["megabytes"]


def one_side(bench, side):
    if bench.dist.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    (bench.shared if side == "shared" else bench.naive)(True)
    if bench.dist.device.type == "cuda":
        print(json.dumps({"megabytes": torch.cuda.max_memory_allocated() / 2**20}))
    else:
        print(json.dumps({"megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def main(argv):
    """Prints the time and peak memory of both sides, their ratios, and the difference of the gradients."""
    kinds = {"fill": Fill, "causal": Causal, "checkpoint": Checkpointed, "vocabulary": Vocabulary}
    if not argv or argv[0] not in kinds:
        raise UsageError(f"python grpo/tools/bench.py {'|'.join(kinds)} [--key=value]")
    c, _ = load_config(BenchConfig, argv[1:])
    if c.side != "both":
        return one_side(kinds[argv[0]](c), c.side)
    # Measured first, because a child process inherits the peak of its parent
    peaks = [peak_memory(argv, side) for side in ("naive", "shared")]
    bench = kinds[argv[0]](c)
    bench.shared(False)
    ours = bench.gradient()
    bench.naive(False)
    difference = float((ours - bench.gradient()).norm() / bench.gradient().norm())
    texts = (f"prompt {c.prompt_length}, completion {c.completion_length}" if isinstance(bench, Causal) else
             f"sequence {c.block_size}, {c.masked:.0%} masked")
    texts += f", vocabulary {c.vocab_size}" * isinstance(bench, Vocabulary)
    print(f"{c.n_layer} layers x {c.n_embd}, {texts}, {c.batch_size} x {c.group_size}, {bench.dist.device}")
    print(f"{'':<24}{bench.columns[0]:>12}{bench.columns[1]:>12}{'ratio':>8}")
    result = bench.report()
    row("peak MB", *peaks, 0)
    print(f"relative difference of the gradients {difference:.1e}")
    print(json.dumps(result | {"memory_ratio": round(peaks[0] / peaks[1], 2), "gradient_difference": difference}))


if __name__ == "__main__":
    run_script(main)
