"""Runs a model's code against a record's tests, in a child process that can neither hang nor fill the machine.

This is a guard against the accidents of a model's code (endless loops, exit calls, floods of memory, files, output or
processes, writes outside its folder), not a security boundary: code that sets out to escape, or to forge its verdict
from within its own interpreter, can. Train on hostile code inside a container or a virtual machine.
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
READY = b"ready\n"    # the child's first word: the limits stand, the code comes next


def run_tests(code, tests, seconds=5.0, megabytes=256):
    """Runs `code` and then `tests`, which see its names; standard library only, no environment, threads only for root.

    seconds: of wall clock, the interpreter's start included; megabytes: of address space (macOS has no such limit)
    Returns "passed" if both ran to their end, "killed" if they were stopped or crashed, else "failed": an exception,
    an exit, and whatever limit Python reports as one (MemoryError, OSError).
    Raises ValueError if the child could not even start under these limits.
    """
    nonce = secrets.token_hex(16)
    limits = {"RLIMIT_CPU": math.ceil(seconds) + 1, "RLIMIT_AS": megabytes << 20, "RLIMIT_FSIZE": 1 << 20,
              "RLIMIT_NOFILE": 32, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    job = json.dumps({"code": code, "tests": tests, "nonce": nonce, "limits": limits}).encode()
    verdict = READY + nonce.encode()
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        said, ended, status = converse(job, folder, time.monotonic() + seconds, len(verdict))
    if ended and said == verdict:
        return "passed"
    if ended and status > 0 and not said:
        raise ValueError(f"the sandbox could not start with seconds={seconds} megabytes={megabytes}: raise them")
    return "failed" if ended and status >= 0 else "killed"


def converse(job, folder, deadline, size):
    """Gives a child its job and listens until it ends, says more than `size` bytes, or the deadline comes.

    Returns (what it said, whether it ended by itself, its exit status). Nothing of its process group is left.
    """
    process = subprocess.Popen([sys.executable, "-I", "-S", "-B", CHILD], cwd=folder, env={}, stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(job)
        said, ended = listen(process.stdout, deadline, size)
    finally:
        # before the child is reaped: after that, its number may be another's
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of the dead is not ours
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        process.stdout.close()
    return said, ended, status


def listen(stream, deadline, size):
    """What comes out of a pipe, and whether that was all of it: not past the deadline, not past `size` bytes."""
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while len(said) <= size:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return said, False
            chunk = os.read(stream.fileno(), 4096)
            if not chunk:
                return said, True
            said += chunk
    return said, False
