"""Runs this code on your GPU and prints a table to paste; docs/one_gpu.md says what to expect.

python grpo/tools/gpu_check.py
python bench/gpu.py sampling training                       # speed and memory
python bench/bench.py peer --device=cuda --dtype=bfloat16   # speed and memory beside TRL
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch

from core.distributed import Distributed
from core.errors import UsageError, run_script

GIB = 2**30


def golden(dtype):
    """The golden runs that differ from the CPU's numbers."""
    command = [sys.executable, "tests/golden/golden.py", "--device=cuda", f"--dtype={dtype}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    differ = re.findall(r"^\w+: (?!equal$).*$", done.stdout, re.M)
    error = done.stderr.strip().rpartition("\n")[2]
    return "; ".join(differ) or (error if done.returncode else "as on the CPU")


def rows(dist):
    """Pairs of what was tried and what was found."""
    yield "machine", (f"{torch.cuda.get_device_name(dist.device)}, "
                      f"{torch.cuda.mem_get_info(dist.device)[1] / GIB:.1f} GiB, torch {torch.__version__}")
    for dtype in ("float32", "bfloat16"):
        yield f"golden runs, {dtype}", golden(dtype)


def main(argv):
    with Distributed() as dist:
        if argv or dist.device.type != "cuda":
            raise UsageError(f"python grpo/tools/gpu_check.py has no settings and needs a GPU, not {dist.device}")
        print("| what | found |\n|---|---|")
        for what, found in rows(dist):
            print(f"| {what} | {found} |", flush=True)


if __name__ == "__main__":
    run_script(main)
