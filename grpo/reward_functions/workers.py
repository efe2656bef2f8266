"""Worker processes in which slow rewards run, with a deadline."""

import contextlib
import math
import multiprocessing
import os
import tempfile
import threading
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from core.errors import Mistake, libraries_first
from grpo.reward_functions.registry import register_functions, run_reward
from grpo.rollout import join

PROCESSES = multiprocessing.get_context("spawn")  # a fork would inherit the run's locks and its GPU


class Workers:
    """`count` processes for rewards, started at the first call.
    timeout: seconds for all completions of a call together; path: the reward_file; names: the rewards of the run"""

    def __init__(self, count, timeout, path=None, names=()):
        self.count = count
        self.timeout = timeout
        self.path = path and os.path.abspath(path)  # a reward may change the working folder
        self.names = names
        self.pool = None

    def call(self, call):
        """Calls a reward once for each completion. Returns (N values, {metric: (sum, count)}).

        A completion is late if its call is not done after `timeout` seconds, or if a process ends before that. Then its
        value is NaN, and the processes are replaced. Raises Mistake if the reward does, or if no process can start.
        """
        if self.pool is None:
            self.start()
        values = [math.nan] * call.N
        metrics = [{}]
        jobs = []
        done = 0
        try:
            with contextlib.suppress(BrokenProcessPool):
                for i in range(call.N):
                    fields = {key: [x[i]] for key, x in call.fields.items()}
                    one = call._replace(fields=fields, N=1)
                    jobs.append(self.pool.submit(run_reward, one))
            wait(jobs, self.timeout, FIRST_EXCEPTION)
            for i, job in enumerate(jobs):
                if job.done() and not isinstance(job.exception(), BrokenProcessPool):
                    numbers, logged = job.result()
                    values[i] = numbers[0]
                    metrics.append(logged)
                    done += 1
        finally:
            if done < call.N:  # late, or the reward failed
                self.close()
        return values, join(metrics)

    def start(self):
        """Starts the processes. Raises Mistake if they cannot start."""
        self.folder = tempfile.TemporaryDirectory(prefix="rewards-", ignore_cleanup_errors=True)
        given = self.path, self.names, self.folder.name
        self.pool = ProcessPoolExecutor(self.count, PROCESSES, begin, given)
        trials = [self.pool.submit(os.getpid) for _ in range(self.count)]
        if any(trial.exception() for trial in trials):
            self.close()
            raise Mistake("a worker process of reward_workers could not start, see above")

    def close(self):
        """Ends the processes, and removes the files that they left. The next call starts new ones."""
        if self.pool is None:
            return
        for process in list((self.pool._processes or {}).values()):  # shutdown would wait for a process that hangs
            process.kill()
        self.pool.shutdown(cancel_futures=True)
        self.pool = None
        self.folder.cleanup()


def begin(path, names, folder):
    """Sets up a worker process that ends with the run, even if the run is killed. folder: for its temporary files"""
    if os.name == "posix":  # Ctrl-C ends the run after its step, which needs the workers
        os.setpgid(0, 0)
    threading.Thread(target=end_with_the_run, daemon=True).start()
    tempfile.tempdir = folder
    libraries_first()  # the process has run the head of the script, which puts the root first in sys.path
    register_functions(names, path)


def end_with_the_run():
    """Waits for the end of the parent process, then ends this process."""
    multiprocessing.parent_process().join()
    os._exit(1)
