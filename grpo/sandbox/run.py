"""Runs a model's code against a record's tests in a child process that the Linux kernel sandboxes.

docs/rewards.md describes the guarantees and their limits.
"""

import contextlib
import errno
import functools
import math
import os
import pathlib
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from subprocess import DEVNULL, PIPE

from core.errors import Mistake
from grpo.sandbox.kernel import PARTS

CHILD = str(pathlib.Path(__file__).with_name("child.py"))
READY = b"ready"        # the child is about to run the code
MOST_BYTES = 1 << 20    # maximum output of the child
POLL_SECONDS = 0.1      # longest wait between two checks of the deadline
# Errors of a machine that lacks resources, which are not the fault of the code
FULL = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.EUSERS}


class Refused(OSError):
    """The child could not start: the kernel refused a part, or memory was too low."""


def run_tests(code, tests, seconds=5.0, megabytes=256, sandbox="auto"):
    """Runs `code`, then `tests`, which are one of

    - Claims of verify_code.py: the child computes the answers to their questions, and this process judges the answers
    - a list of {"input": text, "output": text}: the code runs as a program for each input, and this process compares
      its output
    - Python code: it runs after `code` in the same process, so `code` can forge the result

    seconds: wall-clock limit for Claims or Python code, or for each input, including the interpreter's start;
    megabytes: limit of the address space; sandbox: "auto" or "strict", as in chosen_parts
    Returns "passed" if all tests finished and returned or printed the expected values; "killed" if a test was stopped
    or crashed; "skipped" if the machine lacks disk space, memory or processes to start a test; "failed" otherwise.
    Raises Mistake if the child cannot start for another reason.
    """
    if not isinstance(tests, list):
        tests = [tests]
    try:
        parts = chosen_parts(sandbox)
        for test in tests:
            verdict = run_once(code, test, seconds, megabytes, parts)
            if verdict != "passed":
                return verdict
    except OSError as error:
        if error.errno not in FULL:
            raise Mistake(f"the sandbox cannot start ({error})") from None
        return "skipped"
    return "passed"


def run_once(code, test, seconds, megabytes, parts):
    """Returns the verdict for Claims, for tests in Python, or for one {"input": text, "output": text}.
    Raises OSError if the machine lacks resources for the child, or the kernel refuses one of the parts."""
    kind = "questions"
    token = secrets.token_hex(16).encode()
    messages = [message(token, "exec", code)]
    if isinstance(test, dict):
        kind = "program"
        messages[0] += test["input"].encode(errors="replace")
    elif isinstance(test, str):
        messages.append(message(token, "exec", test))
    else:
        messages += [message(token, "eval", question) for question in test.questions]
    command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", CHILD]
    alarm = math.ceil(seconds) + 1
    arguments = kind, os.getpid(), ",".join(parts), alarm, megabytes
    command += map(str, arguments)
    deadline = time.monotonic() + seconds
    with (tempfile.TemporaryDirectory(prefix="sandbox-") as folder,
          subprocess.Popen(
              command,
              cwd=folder,
              env={},
              stdin=PIPE,
              stdout=PIPE,
              stderr=DEVNULL,
              bufsize=0,
              start_new_session=True) as process):
        try:
            output, ended = exchange(process, messages, deadline)
        finally:  # inside the block, which waits for the process at its end: later its id may be reused
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    status = process.returncode
    if ended and status > 0 and not output.startswith(READY):
        number, _, text = output.decode(errors="replace").partition(" ")
        if number.isdecimal():  # the kernel's refusal
            raise Refused(int(number), text)
        raise Refused(errno.ENOMEM, "the interpreter cannot start")
    if kind == "program":
        expected = READY + test["output"].encode()
        correct = status == 0 and lines_of(output) == lines_of(expected)
    else:
        correct = has_correct_answers(output, token, test)
    if ended and correct:
        return "passed"
    if ended and status >= 0:
        return "failed"
    return "killed"


def has_correct_answers(output, token, test):
    """True if the child answered every message, starting with the code, and the answers to the tests are correct."""
    answers = []
    for line in output.removeprefix(READY).split(b"\n")[:-1]:
        if line.startswith(token):
            answers.append(line.removeprefix(token).decode(errors="replace"))
    if isinstance(test, str):
        return answers[1:] == ["None"]
    return test.hold(answers[1:])


def message(token, how, text):
    """Encodes a message for child.py."""
    data = token + how.encode() + text.encode(errors="replace")
    return len(data).to_bytes(8, "big") + data


def lines_of(output):
    """Splits an output into lines, without trailing spaces and trailing empty lines."""
    text = output.decode(errors="replace").rstrip()
    return [line.rstrip() for line in text.split("\n")]


def exchange(process, messages, deadline):
    """Sends each message after the answer to the previous message, because a question may contain an earlier answer.
    Stops when the output is closed or too long, or at the deadline. Returns (the output, True if it was closed)."""
    output = b""
    unsent = b""  # the rest of the current message
    asked = 0     # messages so far, including the current message
    stdin = process.stdin.fileno()
    stdout = process.stdout.fileno()
    os.set_blocking(stdin, False)  # a child that does not read must not block this process beyond the deadline
    while len(output) <= MOST_BYTES and time.monotonic() < deadline:
        if not unsent and asked < len(messages) and output.count(b"\n") >= asked:
            unsent = messages[asked]
            asked += 1
        watched = select.poll()  # select.select fails in a process with many open files
        watched.register(stdout, select.POLLIN)
        if unsent:
            watched.register(stdin, select.POLLOUT)
        ready = {number for number, _ in watched.poll(POLL_SECONDS * 1000)}
        if stdin in ready:
            try:
                sent = os.write(stdin, unsent[: 1 << 16])
                unsent = unsent[sent:]
            except BrokenPipeError:  # the child has closed its input
                unsent = b""
        if not unsent and asked == len(messages):
            process.stdin.close()  # a program may read to the end of its input
        if stdout in ready:
            part = os.read(stdout, 1 << 16)
            output += part
            if not part:
                return output, True
    return output, False


@functools.cache
def missing_parts():
    """Tries each part. Returns {part of PARTS that this machine's kernel does not support: the reason}. Raises OSError
    if the machine lacks resources for a trial, Mistake if it does not run Linux."""
    if sys.platform != "linux":
        raise Mistake("code_execution needs the sandbox of the Linux kernel; run in a Linux container or virtual "
                      "machine (on Windows: WSL 2), or use other rewards")
    missing = {}
    for part in PARTS:
        try:
            verdict = run_once("", "", 60.0, 256, [part])
        except Refused as error:
            # A temporary lack of memory must not reduce protection. ENOSPC: the machine allows no namespaces
            if error.errno in FULL and error.errno != errno.ENOSPC:
                raise
            missing[part] = error.strerror
        else:
            if verdict != "passed":
                missing[part] = f"a trial was {verdict}"
    return missing


def chosen_parts(sandbox):
    """Returns the PARTS that this machine supports. Raises Mistake if it lacks a part. With sandbox="auto", it may lack
    namespaces, because Landlock still protects files outside the working folder. Namespaces without Landlock would
    leave all files readable, including expected values of tests."""
    missing = missing_parts()
    allowed = {"namespaces"} if sandbox == "auto" else set()
    if missing.keys() - allowed:
        raise Mistake(f"sandbox={sandbox!r} needs what this machine does not offer: {in_words(missing)}; run where "
                      "it does (docs/rewards.md), or use other rewards")
    return [part for part in PARTS if part not in missing]


def in_words(missing):
    """Formats the missing parts and their reasons for a message."""
    return ", ".join(f"{part} ({reason})" for part, reason in missing.items())


def describe_sandbox(sandbox="auto", sandbox_seconds=5.0, sandbox_megabytes=256, **other_settings):
    """Returns a line with the parts and limits of the sandbox. Raises Mistake if an empty program does not pass."""
    verdict = run_tests("", "", sandbox_seconds, sandbox_megabytes, sandbox)
    if verdict != "passed":
        raise Mistake(f"an empty program was {verdict} with sandbox_seconds={sandbox_seconds:g} sandbox_megabytes="
                      f"{sandbox_megabytes}: raise them, or free memory, processes and the disk of TMPDIR")
    parts = ", ".join([*chosen_parts(sandbox), "limits"])
    missing = in_words(missing_parts()) or "nothing"
    return (f"code runs under {parts}, for at most {sandbox_seconds:g} s in {sandbox_megabytes} MB; missing: {missing} "
            "(docs/rewards.md)")
