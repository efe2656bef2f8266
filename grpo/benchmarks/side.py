"""Child processes that take their steps in turns: one works, the others wait at a pipe and use no processor."""

import contextlib
import logging
import multiprocessing
import os
import warnings

# Large blocks stay with the process. glibc reads these when a process starts
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184",
               "MALLOC_TOP_PAD_": "268435456"}


class Side:
    """A child process that takes a step when it is asked to."""

    def __init__(self, run, *arguments, **variables):
        """Calls run(*arguments, turn) in a child with these environment variables; for turn see `work_in_turns`."""
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=work_in_turns, args=(end, run, arguments), daemon=True)
        before = dict(os.environ)
        os.environ.update(variables)
        self.process.start()
        os.environ.clear()
        os.environ.update(before)
        end.close()  # only the child holds it now, so that its end is noticed

    def send(self, go_on):
        """Lets the child take a step, or end."""
        with contextlib.suppress(BrokenPipeError):  # `wait` says why the child has ended
            self.pipe.send(go_on)

    def wait(self):
        """The record of a step, or None once the child is ready for the first. Raises ValueError if it ended."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise ValueError(f"a side of the benchmark ended with exit code {self.process.exitcode}; its error is "
                             "above; a negative code is a signal, -9 often the lack of memory") from None


def work_in_turns(pipe, run, arguments):
    """The life of a child. What it prints and warns of is not part of the table and is dropped; errors are shown.

    run calls turn(None) when it is ready, and turn(record) at the end of every step; turn waits until the next step
    may begin and returns whether there is one.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")

    def turn(record):
        pipe.send(record)
        return pipe.recv()

    run(*arguments, turn)


def in_turns(teams, warmup, steps):
    """Lets teams take steps in turns, A B A B; the sides of a team work at the same time.

    teams: {name: [Side]}. Returns {name: measured steps}, each a list with the record of every side
    """
    sides = [side for team in teams.values() for side in team]
    for side in sides:
        side.wait()
    records = {name: [] for name in teams}
    for _ in range(warmup + steps):
        for name, team in teams.items():
            for side in team:
                side.send(True)
            records[name].append([side.wait() for side in team])
    for side in sides:
        side.send(False)
        side.process.join()
    return {name: found[warmup:] for name, found in records.items()}
