"""Runs a model's code against a record's tests, in a child process that the kernel protects the machine from.

What is promised, on which systems, and what is not: docs/security.md.
"""

import contextlib
import errno
import functools
import math
import os
import pathlib
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from grpo.reward_functions.sandbox_kernel import PARTS

CHILD = str(pathlib.Path(__file__).with_name("sandbox_child.py"))
READY, ENDED = b"ready\n", b"ended\n"  # the child is about to run the code; the code has ended
FOLDER_BYTES = 16 << 20    # the working folder may hold so much
FILE_BYTES = 1 << 20       # and each file so much
OUTPUT_BYTES = 1 << 20     # a child may write so much more than is expected
LOOK_SECONDS = 0.1         # without namespaces, the folder is measured in such intervals
# What the machine has too little of, for which the code is not to blame
FULL = frozenset([errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EUSERS])


def run_tests(code, tests, seconds=5.0, megabytes=256, sandbox="auto"):
    """Runs `code`, then `tests`: a text, with the names that the code defined; or a list of {"input": text,
    "output": text}, for each of which the code runs as a program and this process compares what it printed.

    Both have the standard library only, no environment variables and no threads.
    seconds: wall clock of all tests, with the start of the interpreter; megabytes: address space (macOS cannot limit
    it); sandbox: "auto", or "strict" as in chosen_parts
    Returns "passed" if all ran to their end, and printed what is expected; "killed" if they were stopped or crashed;
    "skipped" if the machine has no disk, memory or processes left; and "failed" after an exception, an exit, or other
    output, which includes the limits that Python reports as exceptions (MemoryError, OSError).
    Raises ValueError if the child cannot start under these limits.
    """
    parts, deadline = chosen_parts(sandbox), time.monotonic() + seconds
    try:
        for test in [tests] if isinstance(tests, str) else tests:
            verdict = run_once(code, test, seconds, megabytes, parts, deadline)
            if verdict != "passed":
                return verdict
    except OSError as error:
        if error.errno in FULL:
            return "skipped"
        raise ValueError(f"the sandbox cannot start ({error}): use sandbox='auto', and a TMPDIR that can be written "
                         "to") from None
    return "passed"


def run_once(code, test, seconds, megabytes, parts, deadline):
    """The verdict for a text with tests, or for one {"input": text, "output": text}.

    Raises OSError if there is no room for the child, or the kernel refuses one of the parts.
    """
    limits = {"RLIMIT_CPU": math.ceil(seconds) + 1, "RLIMIT_AS": megabytes << 20, "RLIMIT_FSIZE": FILE_BYTES,
              "RLIMIT_NOFILE": 32, "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0}
    kind = "tests" if isinstance(test, str) else "program"
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", CHILD, kind, str(os.getpid()), ",".join(parts),
               str(FOLDER_BYTES), *(f"{name}={value}" for name, value in limits.items())]
    if kind == "tests":
        nonce = secrets.token_hex(16).encode()
        first, second, expected = message(code), message(test) + message(nonce), READY + ENDED + nonce
    else:
        first, second, expected = message(code) + encoded(test["input"]), b"", READY + encoded(test["output"])
    size = len(expected) + OUTPUT_BYTES
    with contextlib.suppress(RecursionError), tempfile.TemporaryDirectory(  # too deep to delete: it stays
            prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        on_disk = None if "namespaces" in parts else folder
        output, ended, status = run_child(command, folder, first, second, deadline, size, on_disk)
        full = on_disk is not None and shutil.disk_usage(folder).free < FOLDER_BYTES
    if ended and not output.startswith(READY) and status > 0:
        raise_start_error(output.decode(errors="replace"), seconds, megabytes)
    right = output == expected if kind == "tests" else status == 0 and same_text(output, expected)
    if ended and right:
        return "passed"
    return "skipped" if full else "failed" if ended and status >= 0 else "killed"


def raise_start_error(report, seconds, megabytes):
    """Raises OSError with the number and the text that the child reported, or ValueError if it reported nothing."""
    number, _, text = report.partition(" ")
    if number.isdecimal():
        raise OSError(int(number), text)
    raise ValueError(f"the sandbox could not start with seconds={seconds} megabytes={megabytes}: raise them")


def message(text):
    """A text or bytes after their length, as the child reads them."""
    data = encoded(text)
    return len(data).to_bytes(8, "big") + data


def encoded(text):
    """A text in UTF-8; half a character pair stays what it is, and does not compile."""
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")


def same_text(output, expected):
    """Whether two outputs are equal but for spaces at the ends of lines and empty lines at the end."""
    output, expected = ([line.rstrip() for line in text.decode(errors="replace").rstrip().split("\n")]
                        for text in (output, expected))
    return output == expected


def run_child(command, folder, *exchanged):
    """Starts a child in the folder and ends its process group after the exchange.

    exchanged: arguments of exchange. Returns (the child's output, whether it ended by itself, its exit status).
    """
    process = subprocess.Popen(command, cwd=folder, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        output, ended = exchange(process.stdin, process.stdout, *exchanged)
    finally:
        # before wait(): after it, the process id may belong to another process
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses for a group that has ended
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        process.stdout.close()
        process.stdin.close()
    return output, ended, status


def exchange(child_input, child_output, first, second, deadline, size, folder):
    """Writes `first`; when the child has written that the code has ended, writes `second`. Reads until the output is
    closed, the deadline comes, there are more than `size` bytes, or the folder holds more than FOLDER_BYTES.

    folder: one on the disk, or None: then the kernel limits it

    Returns (the output, whether it was closed).
    """
    output = b""
    os.set_blocking(child_input.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(child_output, selectors.EVENT_READ)
        selector.register(child_input, selectors.EVENT_WRITE)
        while len(output) <= size and (left := deadline - time.monotonic()) > 0:
            ready = {key.fileobj for key, _ in selector.select(left if folder is None else min(left, LOOK_SECONDS))}
            if folder is not None and folder_bytes(folder) > FOLDER_BYTES:
                return output, False
            if child_input in ready:
                first = first[written(child_input, first):]
                if not first:
                    selector.unregister(child_input)
                    if not second:
                        child_input.close()  # a program reads to the end of its input
            if child_output in ready:
                part = os.read(child_output.fileno(), 1 << 16)
                output += part
                if not part:
                    return output, True
                if second and output.startswith(READY) and len(output) >= len(READY + ENDED):
                    if output != READY + ENDED:
                        return output, False
                    first, second = second, b""
                    selector.register(child_input, selectors.EVENT_WRITE)
    return output, False


def written(stream, data):
    """How many bytes of the data a pipe took; all of them if nobody reads it any more."""
    try:
        return os.write(stream.fileno(), data[: 1 << 16])
    except BrokenPipeError:
        return len(data)
    except BlockingIOError:
        return 0


def folder_bytes(folder):
    """How much the files in a folder hold on the disk."""
    total, folders = 0, [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:  # the code may remove what is listed
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return total


@functools.cache
def machine_parts():
    """{part of PARTS: "" if this machine's kernel offers it, or else the reason why not}, tried with a child process
    for each part."""
    if sys.platform != "linux":
        return dict.fromkeys(PARTS, "only Linux has it")
    reasons = dict.fromkeys(PARTS, "")
    for part in PARTS:
        try:
            verdict = run_once("", "", 60.0, 256, [part], time.monotonic() + 60)
            reasons[part] = "" if verdict == "passed" else f"a trial was {verdict}"
        except OSError as error:
            reasons[part] = error.strerror
    return reasons


def chosen_parts(sandbox):
    """The parts of PARTS with which code runs: all that this machine offers. Raises ValueError if sandbox="strict" and
    one is missing."""
    if sandbox == "strict" and missing_parts():
        raise ValueError(f"sandbox='strict' needs what this machine does not offer: {missing_parts()}; run where it "
                         "does, or use sandbox='auto' (docs/security.md says what is then not promised)")
    return [part for part, reason in machine_parts().items() if not reason]


def missing_parts():
    """The parts that this machine does not offer with the reasons, as a text; "" if it offers all."""
    return ", ".join(f"{part} ({reason})" for part, reason in machine_parts().items() if reason)


def describe_sandbox(sandbox, seconds, megabytes):
    """One line that tells the user under what code runs. Raises ValueError as run_tests does, before the first step."""
    run_tests("", "", seconds, megabytes, sandbox)
    parts = ", ".join([*chosen_parts(sandbox), "limits"])
    return (f"code runs under {parts}, for at most {seconds:g} s in {megabytes} MB"
            + (f"; missing: {missing_parts()}: docs/security.md" if missing_parts() else ""))
