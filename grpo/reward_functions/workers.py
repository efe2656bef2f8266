"""Worker processes in which slow rewards run, with a deadline."""

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import wait

from grpo.reward_functions.registry import REWARDS, Log, run_reward
from grpo.sandbox.folder import empty_place
from grpo.sandbox.kernel import end_with

PROCESSES = multiprocessing.get_context("spawn")
ENDED = (EOFError, OSError)  # what a pipe raises when the process at its other end has ended
START_SECONDS = 60  # more than a call may take, for a process that starts: it loads Python and torch
END_SECONDS = 5     # a process that the kernel holds, such as for a disk that does not answer, is then left alone


class Workers:
    """`count` processes, started at the first call; with 0 there are none, and `call` must not be used.

    timeout: the most seconds for all jobs of a call together
    start: a function of a module that each process calls first, as start(*arguments)
    """

    def __init__(self, count, timeout, start, *arguments):
        self.count, self.timeout = count, timeout
        self.start, self.arguments = start, arguments
        self.workers = []

    def call(self, name, fields, settings, N):
        """(values, Log, indices of the late completions) of a reward.

        Each completion (or with whole_group all of them) is one job. A job is late if it is not done after `timeout`
        seconds, or if its process ends: its values are None, and the process is replaced. The time in which processes
        start does not count. Raises ValueError if one cannot start, or if a job raises it.
        """
        size = N if REWARDS[name].whole_group else 1  # completions of a job
        jobs = [(name, {key: x[i : i + size] for key, x in fields.items()}, settings, size) for i in range(0, N, size)]
        self.start_missing()
        try:
            answers = self.answers(jobs)
        finally:
            self.end([worker for worker in self.workers if worker.job is not None])
        values, logs = [], []
        for i in range(len(jobs)):
            found, log = answers.get(i, ([None] * size, Log()))
            values += found
            logs.append((size, log))
        late = {i for i in range(N) if i // size not in answers}
        if late:
            empty_place()  # a process that is ended cannot remove the folder in which its code ran
        return values, Log.join(logs), late

    def answers(self, jobs):
        """{number of a job: what it returned}, without those that are late. Raises ValueError if a job does."""
        waiting, answers = deque(range(len(jobs))), {}
        until = time.monotonic() + self.timeout
        while time.monotonic() < until:
            for worker in self.workers:
                if waiting and worker.job is None:
                    worker.give(waiting.popleft(), jobs)
            if all(worker.job is None for worker in self.workers):
                break
            self.collect(answers, until - time.monotonic())
            if waiting:
                began = time.monotonic()
                self.start_missing()
                until += time.monotonic() - began
        self.collect(answers, 0.0)  # what was done in time and not read yet
        return answers

    def collect(self, answers, seconds):
        """Adds the answers that are ready; if none is, waits for the first, for at most `seconds`. Removes workers
        whose process has ended."""
        busy = {worker.pipe: worker for worker in self.workers if worker.job is not None}
        for pipe in wait(list(busy), max(0.0, seconds)):
            number = busy[pipe].job
            try:
                answers[number] = busy[pipe].answer()
            except ENDED:
                self.end([busy[pipe]])

    def start_missing(self):
        """Starts processes in the place of those that have ended. Raises ValueError if one cannot start."""
        # One that ended after it had answered still has a job: `collect` reads the answer before it ends the worker
        self.end([worker for worker in self.workers if worker.job is None and not worker.process.is_alive()])
        new = [Worker(self.start, self.arguments) for _ in range(self.count - len(self.workers))]
        self.workers += new
        until = time.monotonic() + self.timeout + START_SECONDS
        for worker in new:
            fault = worker.fault(max(0.0, until - time.monotonic()))
            if fault:
                self.close()
                raise ValueError(f"a worker process could not start: {fault}")

    def end(self, workers):
        """Kills the processes of these workers."""
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join(END_SECONDS)
        self.workers = [worker for worker in self.workers if worker not in workers]

    def close(self):
        """Ends the processes; the next call starts new ones."""
        self.end(self.workers)
        empty_place()


class Worker:
    """A process that does one job after another. job: the number of the job that it does, or None."""

    def __init__(self, start, arguments):
        self.job = None
        self.pipe, other_end = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=work, args=(other_end, start, arguments), daemon=True)
        self.process.start()
        other_end.close()  # the process alone holds it, so that the pipe breaks when the process ends

    def fault(self, seconds):
        """The reason why it did not start within so many seconds; "" if it did."""
        if not self.pipe.poll(seconds):
            return "it took too long; raise reward_timeout"
        try:
            self.answer()
        except ENDED:
            self.process.join(END_SECONDS)
            return f"it ended with exit code {self.process.exitcode}"
        except ValueError as error:
            return str(error)
        return ""

    def give(self, number, jobs):
        """Starts a job."""
        self.job = number
        with contextlib.suppress(*ENDED):  # `answer` raises it again
            self.pipe.send(jobs[number])

    def answer(self):
        """The result of its job. Raises one of ENDED if the process has ended, ValueError if the job did."""
        self.job = None
        result, fault = self.pipe.recv()
        if fault:
            raise ValueError(fault)
        return result


def work(pipe, start, arguments):
    """The main function of a process: start(*arguments), then one call of run_reward after another."""
    if hasattr(os, "setpgid"):  # a signal to the run's group ends the run after its step, which needs the workers
        os.setpgid(0, 0)
    end_with_the_run()
    answer_with(pipe, start, arguments)
    while True:
        answer_with(pipe, run_reward, pipe.recv())


def answer_with(pipe, function, arguments):
    """Sends (what the function returns, "") or (None, the text of its error)."""
    try:
        answer = function(*arguments), ""
    except (ValueError, OSError) as error:  # such as one of the user's reward_file, which loads in the main process
        answer = None, str(error) or type(error).__name__
    pipe.send(answer)


def end_with_the_run():
    """This process ends when the run does, however that ends."""
    run = multiprocessing.parent_process()
    if sys.platform == "linux":
        end_with(run.pid)  # a reward may keep every other thread of Python from running
    else:
        threading.Thread(target=lambda: (run.join(), os._exit(1)), daemon=True).start()
