"""Runs a model's code against a record's tests, in a child process with limits on time, memory, files and output.

This protects against accidents of a model's code: endless loops, exit calls, too much memory, output, files or
processes, writes outside its folder. It is not a security boundary: code that is written to escape, or to forge its
verdict inside its own interpreter, can do so. Train on hostile code inside a container or a virtual machine.
"""

import contextlib
import json
import math
import os
import pathlib
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time

CHILD = str(pathlib.Path(__file__).with_name("sandbox_child.py"))
READY = b"ready\n"    # the child's first output: its limits are set, and it is about to run the code


def run_tests(code, tests, seconds=5.0, megabytes=256):
    """Runs `code`, then `tests` with the names that the code defined.

    Both have the standard library only, no environment variables, and threads only if the user is root.
    seconds: wall clock, with the start of the interpreter; megabytes: address space (macOS cannot limit it)
    Returns "passed" if both ran to their end, "killed" if they were stopped or crashed, and "failed" after an exception
    or an exit, which includes the limits that Python reports as exceptions (MemoryError, OSError).
    Raises ValueError if the child cannot start under these limits.
    """
    nonce = secrets.token_hex(16)
    limits = {"RLIMIT_CPU": math.ceil(seconds) + 1, "RLIMIT_AS": megabytes << 20, "RLIMIT_FSIZE": 1 << 20,
              "RLIMIT_NOFILE": 32, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    job = json.dumps({"code": code, "tests": tests, "nonce": nonce, "limits": limits}).encode()
    verdict = READY + nonce.encode()
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        output, ended, status = run_child(job, folder, time.monotonic() + seconds, len(verdict))
    if ended and output == verdict:
        return "passed"
    if ended and status > 0 and not output:
        raise ValueError(f"the sandbox could not start with seconds={seconds} megabytes={megabytes}: raise them")
    return "failed" if ended and status >= 0 else "killed"


def run_child(job, folder, deadline, size):
    """Gives a child its job and reads its output until it ends, writes more than `size` bytes, or the deadline comes.

    Returns (its output, whether it ended by itself, its exit status). All processes of its group are ended.
    """
    process = subprocess.Popen([sys.executable, "-I", "-S", "-B", CHILD], cwd=folder, env={}, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(job)
        output, ended = read_output(process.stdout, deadline, size)
    finally:
        # before wait(): after it, the process id may belong to another process
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group that has ended
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        process.stdout.close()
    return output, ended, status


def read_output(stream, deadline, size):
    """Reads a pipe until it is closed, the deadline comes, or there are more than `size` bytes.

    Returns (the bytes, whether the pipe was closed).
    """
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while len(output) <= size:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return output, False
            chunk = os.read(stream.fileno(), 4096)
            if not chunk:
                return output, True
            output += chunk
    return output, False
