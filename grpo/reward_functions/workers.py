"""Worker processes in which slow rewards run, with a deadline."""

import contextlib
import math
import threading
import time
from collections import deque
from multiprocessing.connection import wait

from grpo.reward_functions.registry import REWARDS, Log, run_reward
from grpo.sandbox.folder import empty_place
from grpo.sandbox.processes import ENDED, Processes, received


class Workers(Processes):
    """`count` processes for rewards; with 0 there are none, and `call` must not be used.

    timeout: the most seconds for all jobs of a call together
    start: a function of a module that each process calls first, as start(*arguments)
    """

    def __init__(self, count, timeout, start, *arguments):
        super().__init__(count, timeout, run_reward, start, *arguments)

    def call(self, name, fields, settings, N):
        """(values, Log, indices of the late completions) of a reward.

        Each completion (or with whole_group all of them) is one job. A job is late if it is not done after `timeout`
        seconds, or if its process ends: its values are NaN, and the process is replaced. The time in which processes
        start does not count. Raises ValueError if one cannot start, or if a job raises it.
        """
        size = N if REWARDS[name].whole_group else 1  # completions of a job
        jobs = []
        for i in range(0, N, size):
            part = {key: x[i : i + size] for key, x in fields.items()}
            jobs.append((name, part, settings, size))
        self.end([pipe for pipe, process in self.processes.items() if not process.is_alive()])
        self.start_missing()
        answers = self.answers(jobs)
        late = {i for i in range(N) if i // size not in answers}
        if late:
            empty_place()  # a process that is ended cannot remove the folder in which its code ran
        of_late = [math.nan] * size, Log()
        found = [answers.get(number, of_late) for number in range(len(jobs))]
        values = [x for numbers, _ in found for x in numbers]
        return values, Log.join([(size, log) for _, log in found]), late

    def answers(self, jobs):
        """{number of a job: its values and Log}, without those that are late. Raises ValueError if a job does."""
        waiting, busy, answers = deque(range(len(jobs))), {}, {}
        until = time.monotonic() + self.timeout
        try:
            while waiting or busy:
                left = until - time.monotonic()
                for pipe in self.processes:
                    if waiting and left > 0 and pipe not in busy:
                        busy[pipe] = waiting.popleft()
                        self.send(pipe, jobs[busy[pipe]], left)
                ready = wait(list(busy), max(0.0, left))
                if not ready:
                    break
                for pipe in ready:
                    number = busy.pop(pipe)
                    try:
                        answers[number] = received(pipe)
                    except ENDED:
                        self.end([pipe])
                        until += self.start_missing()
        finally:
            self.end(busy)
        return answers

    def send(self, pipe, job, seconds):
        """Sends a job. A process that does not read it within these seconds is killed."""
        timer = threading.Timer(seconds, self.processes[pipe].kill)
        timer.start()
        try:
            with contextlib.suppress(*ENDED):  # `received` raises it again
                pipe.send(job)
        finally:
            timer.cancel()

    def close(self):
        super().close()
        empty_place()
