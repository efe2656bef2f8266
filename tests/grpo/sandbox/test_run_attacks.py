"""Each attack of tests/attacks.py is contained: by the whole sandbox, and by the part of the kernel's protection that
stops it, alone and without the guard in the interpreter."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from grpo.reward_functions.asserts import cut
from grpo.sandbox import run as sandbox
from grpo.sandbox.run import machine_parts, run_tests
from tests.attacks import ATTACKS, CALLS, FILES, GUARD, JUDGES, LIMITS, TASKS, child_without, run_attack, succeeds_bare
from tests.forgeries import (
    ALL,
    CLOSE,
    EQUAL,
    FORGERIES,
    KILLED,
    OTHER_TESTS,
    PASS_WHOLE,
    RANDOM,
    SQUARES,
    TABLE,
    UNITTEST,
)
from tests.tiny import ROOT

pytestmark = pytest.mark.slow  # it is the number of them that takes the time

# Of the attacks that other parts stop too, those that the namespaces alone stop
NAMESPACES = ("write", "delete", "write_by_dir_fd", "move_in", "folder", "fifo", "sqlite", "mode", "times", "truncate",
              "attribute", "socket_file", "tcp", "udp", "abstract_socket", "memory_file", "environment")
LONG = ("time", "ignored_signals", "recursion")
ENDED = ("output", "recursion", "time", "ignored_signals")  # by the deadline, the limit on output or a crash
PART = dict.fromkeys(FILES, "Landlock") | dict.fromkeys(CALLS, "seccomp") | dict.fromkeys(LIMITS, "namespaces")


def needs(*parts):
    """Skips a test on a machine that does not offer one of these parts."""
    for part in parts:
        if machine_parts()[part]:
            pytest.skip(f"no {part}: {machine_parts()[part]}")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIMITS)) for name in PART])
def test_an_attack_on_the_machine_is_contained(name, tmp_path):
    needs(PART[name])
    verdict, harm = run_attack(ATTACKS[name], tmp_path, seconds=2 if name in LONG else 10)
    assert verdict in ("failed", "killed") and harm == []


@pytest.mark.slow
@pytest.mark.parametrize("name, part", [*((name, "Landlock") for name in FILES), *((name, "seccomp") for name in CALLS),
                                        *((name, "namespaces") for name in (*NAMESPACES, "many_files"))])
def test_each_part_of_the_kernel_holds_alone(name, part, tmp_path, monkeypatch):
    needs(part)
    for folder in ("child", "target"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(sandbox, "CHILD", child_without(tmp_path / "child", *GUARD))
    monkeypatch.setattr(sandbox, "chosen_parts", lambda setting: [part])
    verdict, harm = run_attack(ATTACKS[name], tmp_path / "target")
    assert verdict in ("failed", "killed") and harm == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="some attacks need root on Linux")
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_succeeds_where_nothing_protects(name):
    assert succeeds_bare(name) == (name not in ENDED), "an attack that cannot succeed tests nothing"


@pytest.mark.parametrize("tests", TASKS, ids=["asserts", "output"])
@pytest.mark.parametrize("name", JUDGES)
def test_code_cannot_replace_what_judges_it(name, tests):
    assert run_tests(JUDGES[name], tests, seconds=10) in ("failed", "killed")


@pytest.mark.parametrize("name", FORGERIES)
def test_a_wrong_solution_cannot_forge_tests_that_are_cut_into_calls(name):
    for tests in (SQUARES, EQUAL, CLOSE):
        assert forged(name, cut(tests)) == "failed"


@pytest.mark.parametrize("name", FORGERIES)
def test_docs_security_names_the_forgeries_that_pass_tests_which_run_whole(name):
    expected = "passed" if name in PASS_WHOLE else "failed"
    assert forged(name, OTHER_TESTS.get(name, SQUARES)) == expected


def forged(name, tests):
    """The verdict for a forgery, with time for its attempt on a busy machine: one that is killed before shows nothing.
    Of those that are ended by design, "killed" is "failed"."""
    if name not in KILLED:
        return run_tests(FORGERIES[name], tests, seconds=60)
    verdict = run_tests(FORGERIES[name], tests, seconds=2)
    return "failed" if verdict == "killed" else verdict


@pytest.mark.parametrize("tests", [SQUARES, EQUAL, CLOSE, ALL, TABLE, UNITTEST, RANDOM])
def test_the_right_solution_passes_the_tests_that_are_forged(tests):
    assert run_tests("def f(x):\n    return x * x", cut(tests) or tests, seconds=60) == "passed"
    assert run_tests("def f(x):\n    return x * x", tests, seconds=60) == "passed"


def test_a_question_is_not_sent_before_the_one_before_is_answered():
    seen = ("import os, re, select\ndef encode(text):\n    if select.select([3], [], [], 0.3)[0]:\n"
            "        return re.search(r\"decode\\('(.*)'\\)\", os.read(3, 9999).decode())[1]\n    return 'nothing'\n"
            "def decode(text):\n    return 'secret'")
    tests = "assert encode('secret') == 'nothing'\nassert decode('frperg') == 'secret'"
    assert run_tests(seen, cut(tests), seconds=60) == "passed", "it knew the argument of decode when encode was called"


@pytest.mark.slow
def test_no_child_survives_its_worker(tmp_path):
    needs("seccomp")
    code = ("import sys\nsys.path.insert(0, sys.argv[1])\nfrom grpo.sandbox.run import *\n"
            "machine_parts()\nprint('here', flush=True)\nrun_tests('import time\\ntime.sleep(600)', '', seconds=500)")
    worker = subprocess.Popen([sys.executable, "-c", code, ROOT], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "TMPDIR": str(tmp_path)})
    assert worker.stdout.readline() == "here\n"
    child = soon(lambda: protected_child(worker.pid))
    time.sleep(0.2)
    assert is_alive(child)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    soon(lambda: not is_alive(child))


def protected_child(worker):
    """The child process of a worker when its system calls are filtered, so that it is about to sleep; else None."""
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended
            text = status.read_text()
            if f"\nPPid:\t{worker}\n" in text and "\nSeccomp:\t2\n" in text:
                return status.parent.name


def is_alive(process):
    """Whether a process runs: it is neither gone nor only waiting for its parent to look at its status."""
    status = pathlib.Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def soon(condition):
    """The value of a condition as soon as it is true. Fails after 20 seconds."""
    for _ in range(400):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come true")
