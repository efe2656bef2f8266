"""Child processes of a benchmark, which take their steps in turns: while one works, the others use no processor."""

import logging
import multiprocessing
import os
import resource
import sys
import time
import warnings

import numpy as np
import torch

from core.errors import Mistake


def in_turns(calls, steps):
    """Lets sides take steps in turns, A B A B, each in a child process. Returns the records of each.

    calls: (run, *arguments) of each side. run calls turn(None) when it is ready, and turn(record) at the end of every
    step; turn waits until the next step may begin and returns whether there is one.
    """
    context = multiprocessing.get_context("spawn")
    sides = []
    for call in calls:
        pipe, end = context.Pipe()
        process = context.Process(target=work_in_turns, args=(end, *call), daemon=True)
        process.start()
        end.close()  # only the child holds it now, so that its end is noticed
        step(process, pipe)
        sides.append((process, pipe))
    records = [[step(*side) for side in sides] for _ in range(steps)]
    for process, pipe in sides:
        pipe.send(False)
        process.join()
    return list(zip(*records, strict=True))


def step(process, pipe):
    """The record of the step that the child takes now."""
    try:
        pipe.send(True)
        return pipe.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise Mistake(f"a side of the benchmark ended with exit code {process.exitcode}: see above; -9 is often "
                      "the lack of memory") from None


def work_in_turns(pipe, run, *arguments):
    """The life of a child. Its errors are shown; what it prints and warns of is not part of the table."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")

    def turn(record):
        pipe.send(record)
        return pipe.recv()

    pipe.recv()
    run(*arguments, turn)


def memory_in_use(device):
    """The most megabytes that this process has needed so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    if sys.platform == "linux":  # of this program alone; resource counts the process that started it too
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("VmHWM")) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def started(device):
    """The time, when a GPU has finished: it still computes when a function returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def record_of(start, device):
    """The record of a step that began at `start`."""
    return {"seconds": started(device) - start, "megabytes": memory_in_use(device)}


def problems(prompts):
    """Prompts (P, T) of one length as problems of core/prompts.py: PromptConsumer."""
    P = len(prompts)
    return {
        "input": prompts,
        "padding": np.zeros(P, dtype=np.int64),
        "number": np.arange(P),
        "record": [{"text": "a", "prompt": "a", "tokens": ids} for ids in prompts.tolist()]}
