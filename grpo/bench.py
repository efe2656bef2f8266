"""What sharing the forward buys: this step against one that forwards every completion on its own.

python grpo/bench.py fill                    6 layers x 384, sequence 256, 16 inputs x 8 completions, 30% masked
python grpo/bench.py fill --n_layer=4 --n_embd=128 --block_size=128 --batch_size=16

Both sides train on the same completions. The last line is one JSON object.
"""

import copy
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import numpy as np
import torch

from core.checkpoint_manager import freeze
from core.config import UsageError, load_config, run_script
from core.distributed import Distributed, detect_dtype
from core.judge import calculate_judge_scores
from core.model import GPT, MASKED_FILL, SEQUENCE_SCORER, GPTConfig
from core.tokenizer import CharTokenizer
from grpo.advantages import compute_advantages
from grpo.grpo_config import GRPOConfig
from grpo.grpo_training_step import rollout_loss
from grpo.objectives import token_weights
from grpo.rollout import collect

TOKENIZER = CharTokenizer()


@dataclass(frozen=True)
class BenchConfig:
    n_layer: int = 6
    n_head: int = 6
    n_embd: int = 384
    block_size: int = 256
    batch_size: int = 16
    group_size: int = 8
    masked: float = 0.3
    repeats: int = 3
    device: str = "auto"
    dtype: str = "float32"
    side: str = "both"     # naive or shared: one step of that side alone, for its peak memory


class Setup:
    """Models and one batch of problems, the same on both sides."""

    def __init__(self, c):
        self.c, self.dist = c, Distributed(c.device)
        torch.manual_seed(0)
        shape = (TOKENIZER.vocab_size, TOKENIZER.base_vocab_size, c.block_size, c.n_layer, c.n_head, c.n_embd)
        self.policy = GPT(GPTConfig(MASKED_FILL, *shape)).to(self.dist.device).eval()
        self.reference = freeze(copy.deepcopy(self.policy))
        self.judge = freeze(GPT(GPTConfig(SEQUENCE_SCORER, *shape)).to(self.dist.device))
        self.config = GRPOConfig(batch_size=c.batch_size, group_size=c.group_size, block_size=c.block_size, top_p=1.0,
                                 temperature=1.0)
        self.autocast = self.dist.autocast(detect_dtype(c.dtype, self.dist.device))
        rng = np.random.default_rng(0)
        target = rng.integers(TOKENIZER.base_vocab_size, size=(c.batch_size, c.block_size))
        mask = rng.random((c.batch_size, c.block_size)).argsort(1) < round(c.masked * c.block_size)
        self.batch = {"input": np.where(mask, TOKENIZER.mask_token_id, target), "target": target, "mask": mask,
                      "number": np.arange(c.batch_size)}
        self.completions = self.collect()
        reward = torch.rand(c.batch_size, c.group_size, device=self.dist.device)
        self.advantage = compute_advantages(reward, "group_std").view(-1, 1)

    def collect(self):
        return collect(self.policy, self.reference, self.batch, 0, self.config, self.dist.device, self.autocast)

    def shared(self, judged):
        """Our step up to the gradient: an input is read once per model."""
        self.policy.zero_grad()
        rollouts = self.collect()
        with self.autocast:
            if judged:
                calculate_judge_scores(self.judge, rollouts.text, TOKENIZER.cls_token_id)
            weight = token_weights(rollouts.mask, "sequence", self.c.block_size)
            rollout_loss(self.policy, rollouts, self.advantage, weight, self.config)[0].backward()

    def naive(self, judged):
        """The usual step: every completion a row of its own in every model, logits at every position."""
        self.policy.zero_grad()
        done, c = self.completions, self.config
        inputs = done.inputs[done.row]                                               # (N, T)
        hidden = inputs == TOKENIZER.mask_token_id                                   # (N, T)
        with self.autocast:
            with torch.no_grad():
                torch.multinomial(self.policy(inputs).softmax(-1).flatten(0, 1), 1)  # sampling
                ref_logp = self.reference(inputs).log_softmax(-1)                    # (N, T, V)
                if judged:
                    self.judge(done.text).sigmoid().mean(1)
            logp = self.policy(inputs).log_softmax(-1)                               # (N, T, V)
        chosen = logp.gather(-1, done.text[..., None]).squeeze(-1)                   # (N, T)
        term = -torch.exp(chosen - chosen.detach()) * self.advantage                 # (N, T)
        term = term + c.kl_beta * (logp.exp() * (logp - ref_logp)).sum(-1)
        ((term * hidden).sum(1) / hidden.sum(1)).mean().backward()

    def gradient(self):
        return torch.cat([p.grad.flatten() for p in self.policy.parameters()])

    def seconds(self, step, judged):
        on_gpu = self.dist.device.type == "cuda"
        times = []
        for _ in range(self.c.repeats + 1):  # the first warms up
            start = time.perf_counter()
            step(judged)
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])


def peak_memory(argv, side):
    """Peak megabytes of a process that runs one step of one side: on a CPU all of it, on a GPU what torch allocated."""
    command = [sys.executable, __file__, "fill", *argv, f"--side={side}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().split("\n")[-1])["megabytes"]


def one_side(setup, side):
    step = setup.shared if side == "shared" else setup.naive
    step(True)
    if setup.dist.device.type == "cuda":
        print(json.dumps({"megabytes": torch.cuda.max_memory_allocated() / 2**20}))
    else:
        print(json.dumps({"megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def main(argv):
    """Both sides' time, with and without the judge, their peak memory, and the difference of their gradients."""
    if not argv or argv[0] != "fill":
        raise UsageError("python grpo/bench.py fill [--key=value]: fill is the benchmark there is")
    c, _ = load_config(BenchConfig, argv[1:])
    if c.side != "both":
        return one_side(Setup(c), c.side)
    peaks = [peak_memory(argv[1:], side) for side in ("naive", "shared")]  # first: a child inherits its parent's peak
    setup = Setup(c)
    setup.shared(False)
    ours = setup.gradient()
    setup.naive(False)
    difference = float((ours - setup.gradient()).norm() / setup.gradient().norm())
    print(f"{c.n_layer} layers x {c.n_embd}, sequence {c.block_size}, {c.batch_size} inputs x {c.group_size}, "
          f"{c.masked:.0%} masked, {setup.dist.device}\n{'':<24}{'naive':>12}{'shared':>12}{'ratio':>8}")
    result = {}
    for judged, key in ((True, "time_ratio"), (False, "time_ratio_without_judge")):
        naive, shared = setup.seconds(setup.naive, judged), setup.seconds(setup.shared, judged)
        result[key] = round(naive / shared, 2)
        name = "seconds, judge" if judged else "seconds, no judge"
        print(f"{name:<24}{naive:>12.3f}{shared:>12.3f}{naive / shared:>8.2f}")
    naive, shared = peaks
    result |= {"memory_ratio": round(naive / shared, 2), "gradient_difference": difference}
    print(f"{'peak MB':<24}{naive:>12.0f}{shared:>12.0f}{naive / shared:>8.2f}")
    print(f"relative difference of the gradients {difference:.1e}")
    print(json.dumps(result))


if __name__ == "__main__":
    run_script(main)
