"""Processes that answer jobs one after another, and can be killed."""

import contextlib
import multiprocessing
import os
import pickle
import sys
import threading
import time

from grpo.sandbox.kernel import end_with

PROCESSES = multiprocessing.get_context("spawn")
ENDED = (EOFError, OSError)  # what a pipe raises when the process at its other end has ended
START_SECONDS = 60  # more than a call may take, for a process that starts: it loads Python and torch
END_SECONDS = 5     # a process that the kernel holds, such as for a disk that does not answer, is then left alone


class Processes:
    """`count` processes, started at the first call.

    timeout: seconds that an answer may take
    start: a function of a module that each process calls first, as start(*arguments)
    answer: a function of a module that each process calls with every job, as answer(*job)
    """

    def __init__(self, count, timeout, answer, start, *arguments):
        self.count, self.timeout, self.answer = count, timeout, answer
        self.start, self.arguments = start, arguments
        self.processes = {}  # {pipe: the process at its other end}

    def start_missing(self):
        """Starts processes in the place of those that have ended. Returns the seconds that it took. Raises ValueError
        if one cannot start."""
        began = time.monotonic()
        new = [self.start_one() for _ in range(self.count - len(self.processes))]
        until = began + self.timeout + START_SECONDS
        try:
            for pipe in new:
                self.wait_for_start(pipe, max(0.0, until - time.monotonic()))
        except ValueError as error:
            self.close()
            raise ValueError(f"a worker process could not start: {error}") from None
        return time.monotonic() - began

    def start_one(self):
        """Starts a process. Returns the pipe to it."""
        pipe, other_end = PROCESSES.Pipe()
        process = PROCESSES.Process(target=work, args=(other_end, self.start, self.arguments, self.answer), daemon=True)
        process.start()
        other_end.close()  # the process alone holds it, so that the pipe breaks when the process ends
        self.processes[pipe] = process
        return pipe

    def wait_for_start(self, pipe, seconds):
        """Raises ValueError if a process does not start within these seconds."""
        if not pipe.poll(seconds):
            raise ValueError("it took too long; raise reward_timeout")
        try:
            received(pipe)
        except ENDED:
            self.processes[pipe].join(END_SECONDS)
            raise ValueError(f"it ended with exit code {self.processes[pipe].exitcode}") from None

    def end(self, pipes):
        """Kills the processes at the other ends of these pipes."""
        for pipe in pipes:
            process = self.processes.pop(pipe, None)
            if process is not None:
                process.kill()
                process.join(END_SECONDS)

    def close(self):
        """Ends the processes; the next call starts new ones."""
        self.end(list(self.processes))


def received(pipe):
    """The answer of a process. Raises one of ENDED if the process has ended, ValueError if its job did."""
    result, fault = pipe.recv()
    if fault:
        raise ValueError(fault)
    return result


def work(pipe, start, arguments, answer):
    """The main function of a process, which ends when the run does, however that ends: start(*arguments), then one call
    of `answer` after another."""
    if hasattr(os, "setpgid"):  # a signal to the run's group ends the run after its step, which needs the workers
        os.setpgid(0, 0)
    run = multiprocessing.parent_process()
    if sys.platform == "linux":
        end_with(run.pid)  # a reward may keep every other thread of Python from running
    else:
        threading.Thread(target=lambda: (run.join(), os._exit(1)), daemon=True).start()
    answer_with(pipe, start, arguments)
    with contextlib.suppress(EOFError):  # the run has closed its end of the pipe
        while True:
            answer_with(pipe, answer, pipe.recv())


def answer_with(pipe, function, arguments):
    """Sends (what the function returns, "") or (None, the text of its error)."""
    try:
        answer = function(*arguments), ""
    except (ValueError, OSError) as error:  # such as one of the user's reward_file, which loads in the main process
        answer = None, str(error) or type(error).__name__
    try:
        pipe.send(answer)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        pipe.send((None, f"a worker process returned what cannot be sent to the run: {error}"))
