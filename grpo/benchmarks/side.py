"""Child processes that take their steps in turns: one works, the others wait at a pipe and use no processor."""

import logging
import multiprocessing
import os
import warnings


class Side:
    """A child process that takes a step when it is asked to."""

    def __init__(self, run, *arguments):
        """Calls run(*arguments, turn) in a child and waits until it is ready for its first step."""
        context = multiprocessing.get_context("spawn")
        self.pipe, end = context.Pipe()
        self.process = context.Process(target=work_in_turns, args=(end, run, arguments), daemon=True)
        self.process.start()
        end.close()  # only the child holds it now, so that its end is noticed
        self.step()

    def step(self):
        """The record of a step that the child takes now. Raises ValueError if it has ended."""
        try:
            self.pipe.send(True)
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise ValueError(f"a side of the benchmark ended with exit code {self.process.exitcode}; its error is "
                             "above; a negative code is a signal, -9 often the lack of memory") from None

    def end(self):
        self.pipe.send(False)
        self.process.join()


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

    pipe.recv()
    run(*arguments, turn)


def in_turns(calls, steps):
    """Lets sides take steps in turns, A B A B. calls: (run, *arguments) of each Side. Returns the records of each."""
    sides = [Side(*call) for call in calls]
    records = [[side.step() for side in sides] for _ in range(steps)]
    for side in sides:
        side.end()
    return list(zip(*records, strict=True))
