"""Worker processes in which slow rewards run, with a deadline."""

import multiprocessing
import os
import sys
import threading
import time

from grpo.reward_functions.registry import REWARDS, Log, run_reward
from grpo.reward_functions.sandbox_folder import empty_place
from grpo.reward_functions.sandbox_kernel import end_with


class Workers:
    """`count` processes, started at the first call; with 0 there are none, and `call` must not be used.

    timeout: seconds that a call may take; start: a function of a module, called in each process as start(*arguments)
    """

    def __init__(self, count, timeout, start, *arguments):
        self.count, self.timeout, self.start, self.arguments, self.pool = count, timeout, start, arguments, None

    def call(self, name, fields, settings, N):
        """(values, Log, indices of the late completions) of a reward.

        Each completion (or with whole_group all of them) is one job. Jobs that are not done after `timeout` seconds
        are late: their values are None, and the processes are ended. A ValueError of a job is raised here.
        """
        self.pool = self.pool or start_pool(self.count, self.start, self.arguments)
        late, values, logs = set(), [], []
        cuts = [slice(0, N)] if REWARDS[name].whole_group else [slice(i, i + 1) for i in range(N)]
        jobs = [self.pool.apply_async(run_reward, (name, {key: x[cut] for key, x in fields.items()}, settings,
                                                   cut.stop - cut.start)) for cut in cuts]
        deadline = time.monotonic() + self.timeout
        for cut, job in zip(cuts, jobs, strict=True):
            n = cut.stop - cut.start
            try:
                found, log = job.get(max(0.0, deadline - time.monotonic()))
            except ValueError as error:  # without the worker's traceback, which multiprocessing puts into its cause
                raise ValueError(str(error)) from None
            except multiprocessing.TimeoutError:
                late |= set(range(cut.start, cut.stop))
                found, log = [None] * n, Log()
            values += found
            logs.append((n, log))
        if late:
            self.close()
        return values, Log.join(logs), late

    def close(self):
        """Ends the processes; the next call starts new ones."""
        if self.pool is not None:
            self.pool.terminate()
            self.pool.join()
            self.pool = None
            empty_place()  # a process that is ended cannot remove the folder in which its code ran


def start_pool(count, start, arguments):
    """Worker processes; returns when all have started, which is no part of a job's time. Raises ValueError if one
    cannot start."""
    spawn = multiprocessing.get_context("spawn")
    started = spawn.SimpleQueue()
    pool = spawn.Pool(count, start_worker, (started, start, arguments))
    for _ in range(count):
        if fault := started.get():
            pool.terminate()
            raise ValueError(fault)
    return pool


def start_worker(started, start, arguments):
    if hasattr(os, "setpgid"):  # a signal to the run's group ends the run after its step, which needs the workers
        os.setpgid(0, 0)
    fault = "a worker process could not start"
    try:  # if nothing is put, the pool starts processes for ever
        end_with_the_run()
        start(*arguments)
        fault = ""
    except (ValueError, OSError) as error:  # such as one of the user's reward_file, which loads in the main process
        fault += f": {error}"
    finally:
        started.put(fault)


def end_with_the_run():
    """This process ends when the run does, however that ends."""
    run = multiprocessing.parent_process()
    if sys.platform == "linux":
        end_with(run.pid)  # a reward may keep every other thread of Python from running
    else:
        threading.Thread(target=lambda: (run.join(), os._exit(1)), daemon=True).start()
