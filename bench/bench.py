"""Time and memory of this training step, compared with the usual step and with TRL's.

python bench/bench.py fill      6 layers x 384, sequence 256, 16 inputs x 8 completions, 30% masked
python bench/bench.py causal    prompts of 256 tokens, read once or again with each completion of 64 tokens
python bench/bench.py peer      TRL and this project in turns (pip install trl accelerate)
python bench/bench.py fill --n_layer=4 --n_embd=128 --block_size=128 --batch_size=16
python bench/bench.py peer --cases=T,S_long --steps=3

fill and causal compare with a step that reads every completion separately. The last line is one JSON object.
"""

import os
import sys
from functools import partial

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from bench.comparison import BenchConfig, Causal, Fill, compare
from bench.peer import PeerConfig, run_peer
from core.config import UsageError, load_config
from core.settings.script import run_script

BENCHMARKS = {
    "fill": (BenchConfig, partial(compare, Fill)),
    "causal": (BenchConfig, partial(compare, Causal)),
    "peer": (PeerConfig, run_peer)}


def main(argv):
    """Runs the benchmark that the first argument names."""
    if not argv or argv[0] not in BENCHMARKS:
        raise UsageError(f"python bench/bench.py {'|'.join(BENCHMARKS)} [--key=value]")
    config, run = BENCHMARKS[argv[0]]
    c, _ = load_config(config, argv[1:])
    run(c)


if __name__ == "__main__":
    run_script(main)
