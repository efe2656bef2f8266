"""Child processes that take their steps in turns: one works, the others wait at a pipe and use no processor."""

import contextlib
import logging
import multiprocessing
import os
import resource
import warnings

import torch

# Large blocks stay with the process. glibc reads these when a process starts
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184",
               "MALLOC_TOP_PAD_": "268435456"}


class Side:
    """A child process that takes steps, each when it is told to."""

    def __init__(self, run, *arguments, **environment):
        """run(*arguments, turn): is called in the child; for turn see `work_in_turns`"""
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        with variables(environment):
            self.process = context.Process(target=work_in_turns, args=(end, run, arguments), daemon=True)
            self.process.start()
        end.close()  # only the child holds it now, so that its end is noticed

    def begin(self):
        """Lets the child take a step. Raises ValueError if it ended."""
        try:
            self.pipe.send(True)
        except BrokenPipeError:
            raise self.ended() from None

    def wait(self):
        """What the child reports at the end of a step, or None once it is ready for the first. Raises ValueError if
        it ended."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self.ended() from None

    def ended(self):
        """The error of a child that ended, as one line for the user."""
        self.process.join()
        return ValueError(f"a side of the benchmark ended with exit code {self.process.exitcode}; its error is above; "
                          "a negative code is a signal, -9 often the lack of memory")

    def step(self):
        self.begin()
        return self.wait()

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(False)
        self.process.join()
        self.pipe.close()


def work_in_turns(pipe, run, arguments):
    """The life of a child. What it prints and warns of is not part of the table and is dropped; errors are shown.

    run calls turn(None) when it is ready, and turn(record) at the end of every step; turn waits until the next step
    may begin and returns whether there is one. A record gets "megabytes", the process's peak memory so far.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")

    def turn(record):
        pipe.send(None if record is None else record | {"megabytes": peak_megabytes()})
        return pipe.recv()

    run(*arguments, turn)


def peak_megabytes():
    """Peak memory: on a GPU of what torch allocated, else of the whole process."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    with contextlib.suppress(FileNotFoundError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # not below the peak of the parent process


@contextlib.contextmanager
def variables(values):
    """Within it, these environment variables are set."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def in_turns(sides, warmup, steps):
    """Steps of all sides in turns, A B A B. sides: {name: Side}. Returns {name: records of the measured steps}."""
    for side in sides.values():
        side.wait()
    records = {name: [] for name in sides}
    for number in range(warmup + steps):
        for name, side in sides.items():
            record = side.step()
            if number >= warmup:
                records[name].append(record)
    for side in sides.values():
        side.close()
    return records
