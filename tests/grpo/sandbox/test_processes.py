"""Worker processes: they answer jobs, and end with the run."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from grpo.reward_functions.registry import load_reward_file
from grpo.sandbox import processes
from grpo.sandbox.processes import Processes, received
from tests.tiny import ROOT, fork_workers


def endless():
    while True:
        pass


def exits():
    os._exit(0)


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_answers_its_jobs_in_their_order_and_errors_of_users_as_errors(monkeypatch):
    fork_workers(monkeypatch)
    made = Processes(2, 60.0, int, os.getpid)
    made.start_missing()
    pids = {process.pid for process in made.processes.values()}
    for pipe in made.processes:
        for job in ("1", "two", "3"):
            pipe.send((job,))
        assert received(pipe) == 1
        with pytest.raises(ValueError, match="invalid literal for int.*'two'"):
            received(pipe)
        assert received(pipe) == 3
    made.end(list(made.processes)[:1])
    made.start_missing()
    assert len(made.processes) == 2 and len(pids & {process.pid for process in made.processes.values()}) == 1
    made.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("start", "arguments", "message"), [
    (endless, (), "it took too long; raise reward_timeout"),
    (exits, (), "it ended with exit code 0"), (is_killed, (), "it ended with exit code -9"),
    (os.listdir, ("gone",), "[^\n]*No such file or directory: 'gone'"),
    (load_reward_file, ("mine.py",), "mine.py, line 3: raise KeyError[^\n]*no key here'")])
def test_a_process_that_cannot_start_is_one_line(monkeypatch, tmp_path, start, arguments, message):
    fork_workers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import multiprocessing\nif multiprocessing.parent_process():\n"
                                      "    raise KeyError('no key here')\n")
    made = Processes(2, 60.0, len, start, *arguments)
    if start is endless:
        monkeypatch.setattr(processes, "START_SECONDS", 0.1)
        made.timeout = 0.1
    with pytest.raises(ValueError, match=f"^a worker process could not start: {message}$"):
        made.start_missing()
    assert not multiprocessing.active_children()


BUSY = """import os
from grpo.sandbox.processes import Processes

def busy():
    print(os.getpid(), flush=True)
    pow(10**6000, 10**200000, 10**6000 + 3)  # minutes; Python runs no other thread meanwhile

if __name__ == "__main__":
    made = Processes(1, 60.0, busy, os.getpid)
    made.start_missing()
    next(iter(made.processes)).send(())
    made.processes.popitem()[1].join()
"""


@pytest.mark.slow
def test_a_worker_that_is_busy_ends_with_a_run_that_is_killed(tmp_path):
    (tmp_path / "run.py").write_text(BUSY)
    run = subprocess.Popen([sys.executable, tmp_path / "run.py"], stdout=subprocess.PIPE, text=True,
                           env=os.environ | {"PYTHONPATH": str(ROOT)})
    pid = int(run.stdout.readline())
    run.kill()
    run.wait()
    try:
        for _ in range(500):
            os.kill(pid, 0)
            if "State:\tZ" in open(f"/proc/{pid}/status").read():  # ended, and nobody has asked for its exit code
                return
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
        pytest.fail("it goes on without the run")
    except (ProcessLookupError, FileNotFoundError):
        pass
