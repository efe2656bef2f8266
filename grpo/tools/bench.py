"""Time and memory of this training step, compared with other ways to compute it and with TRL.

python grpo/tools/bench.py fill         6 layers x 384, sequence 256, 16 inputs x 8 completions, 30% masked
python grpo/tools/bench.py causal       prompts of 256 tokens, read once or again with each completion of 64 tokens
python grpo/tools/bench.py checkpoint   grad_checkpoint: activations stored, or computed again in the backward pass
python grpo/tools/bench.py vocabulary   a Hugging Face model of 151,936 tokens: logits whole, or in parts
python grpo/tools/bench.py peer         TRL and this project in turns (pip install -r requirements-peer.txt)
python grpo/tools/bench.py growth       over group size, length, model size, vocabulary; one rank and two
python grpo/tools/bench.py fill --n_layer=4 --n_embd=128 --block_size=128 --batch_size=16
python grpo/tools/bench.py peer --cases=T,S_mixed --steps=3

The first four compare with the usual step, which reads every completion separately or keeps everything, on the same
completions. The last line is one JSON object.
"""

import json
import os
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import torch

from core.config import UsageError, load_config
from core.settings.script import run_script
from grpo.benchmarks.causal import Causal, Vocabulary
from grpo.benchmarks.comparison import BenchConfig, peak_megabytes, row
from grpo.benchmarks.fill import Checkpointed, Fill
from grpo.benchmarks.growth import GrowthConfig, run_growth
from grpo.benchmarks.peer import PeerConfig, run_peer

COMPARISONS = {"fill": Fill, "causal": Causal, "checkpoint": Checkpointed, "vocabulary": Vocabulary}
OTHERS = {"peer": (PeerConfig, run_peer), "growth": (GrowthConfig, run_growth)}


def peak_of_process(argv, side):
    """Peak megabytes of a process that runs one step of one side."""
    command = [sys.executable, __file__, *argv, f"--side={side}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().split("\n")[-1])["megabytes"]


def one_side(bench, side):
    """Takes one step of one side and prints the peak of this process."""
    if bench.dist.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    if side == "shared":
        bench.shared()
    else:
        bench.naive()
    print(json.dumps({"megabytes": peak_megabytes(bench.dist.device)}))


def compare(argv):
    """Prints the time and peak memory of both sides, their ratios, and the difference of the gradients."""
    kind = COMPARISONS[argv[0]]
    c, _ = load_config(BenchConfig, argv[1:])
    if c.side != "both":
        return one_side(kind(c), c.side)
    # Measured first: without /proc, the peak of a child process is not below that of its parent
    naive_peak = peak_of_process(argv, "naive")
    shared_peak = peak_of_process(argv, "shared")
    bench = kind(c)
    bench.shared()
    shared = bench.gradient()
    bench.naive()
    naive = bench.gradient()
    difference = float((shared - naive).norm() / naive.norm())
    print(f"{c.n_layer} layers x {c.n_embd}, {bench.describe()}, {c.batch_size} x {c.group_size}, {bench.dist.device}")
    print(f"{'':<24}{bench.columns[0]:>12}{bench.columns[1]:>12}{'ratio':>8}")
    result = bench.report()
    row("peak MB", naive_peak, shared_peak, 0)
    print(f"relative difference of the gradients {difference:.1e}")
    print(json.dumps(result | {"memory_ratio": round(naive_peak / shared_peak, 2), "gradient_difference": difference}))


def main(argv):
    """Runs the benchmark that the first argument names."""
    if not argv or argv[0] not in COMPARISONS | OTHERS:
        raise UsageError(f"python grpo/tools/bench.py {'|'.join(COMPARISONS | OTHERS)} [--key=value]")
    if argv[0] in COMPARISONS:
        return compare(argv)
    config, run = OTHERS[argv[0]]
    c, _ = load_config(config, argv[1:])
    run(c)


if __name__ == "__main__":
    run_script(main)
