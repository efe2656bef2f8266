"""Time and memory of this training step, compared with other ways to compute it and with TRL.

python grpo/tools/bench.py fill         6 layers x 384, sequence 256, 16 inputs x 8 completions, 30% masked
python grpo/tools/bench.py causal       prompts of 256 tokens, read once or again with each completion of 64 tokens
python grpo/tools/bench.py turns        completions of one turn, and of several with an environment between them
python grpo/tools/bench.py checkpoint   grad_checkpoint: activations stored, or computed again in the backward pass
python grpo/tools/bench.py peer         TRL and this project in turns (pip install -r requirements-peer.txt)
python grpo/tools/bench.py learning     TRL and this project learn in turns: SmolLM2, or --task=tools
python grpo/tools/bench.py fill --n_layer=4 --n_embd=128 --block_size=128 --batch_size=16
python grpo/tools/bench.py peer --cases=T,S_mixed --steps=3

fill, causal and checkpoint compare with the usual step, which reads every completion separately or keeps everything, on
the same completions. The last line is one JSON object.
"""

import os
import sys
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from core.config import UsageError, load_config
from core.settings.script import run_script
from grpo.benchmarks.comparison import BenchConfig, Causal, Checkpointed, Fill, Turns, compare
from grpo.benchmarks.learning import LearningConfig, run_learning
from grpo.benchmarks.peer import PeerConfig, run_peer

BENCHMARKS = {
    "fill": (BenchConfig, partial(compare, Fill)),
    "causal": (BenchConfig, partial(compare, Causal)),
    "turns": (BenchConfig, partial(compare, Turns)),
    "checkpoint": (BenchConfig, partial(compare, Checkpointed)),
    "peer": (PeerConfig, run_peer),
    "learning": (LearningConfig, run_learning),
}


def main(argv):
    """Runs the benchmark that the first argument names."""
    if not argv or argv[0] not in BENCHMARKS:
        raise UsageError(f"python grpo/tools/bench.py {'|'.join(BENCHMARKS)} [--key=value]")
    config, run = BENCHMARKS[argv[0]]
    c, _ = load_config(config, argv[1:])
    run(c)


if __name__ == "__main__":
    run_script(main)
