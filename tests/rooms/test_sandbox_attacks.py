"""Attacks on the machine are contained, and wrong solutions cannot forge tests that are cut into calls.

Attacks and forgeries that succeed where nothing protects show that they try.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from grpo.reward_functions.verify_code import cut
from grpo.sandbox.run import missing_parts, run_tests
from tests.rooms import forgeries
from tests.rooms.attack_programs import JUDGES
from tests.rooms.attacks import ALONE, ATTACKS, PART, TASKS, contained, protected_by, succeeds_bare
from tests.rooms.forgeries import ENDED, FORGERIES, OTHER_TESTS, PASS_WHOLE, SQUARES
from tests.tiny import ROOT

pytestmark = [pytest.mark.slow,  # it is the number of them that takes the time
              pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the sandbox")]
SOME_BARE = ("write_by_dir_fd", "sqlite_attach", "memory_file", "signal_by_pidfd", "parent_memory", "fork", "tcp",
             "memory", "many_files")
SOME_WHOLE = ("equal object", "frames in f", "del before the tests", "bytecode", "isclose", "exit handler",
              "SystemExit in f", "pipe in ==", "code of the runner")


def needs(part):
    """Skips a test on a machine that does not offer this part."""
    if part in missing_parts():
        pytest.skip(f"no {part}: {missing_parts()[part]}")


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_the_machine_is_contained(name):
    needs(PART[name])
    assert contained(name)


@pytest.mark.parametrize(("name", "part"), ALONE)
def test_each_part_of_the_kernel_holds_alone(name, part):
    needs(part)
    with protected_by(part):
        assert contained(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="some attacks need root")
@pytest.mark.parametrize("name", SOME_BARE)
def test_an_attack_succeeds_where_nothing_protects(name):
    assert succeeds_bare(name), "an attack that cannot succeed tests nothing"


@pytest.mark.parametrize("tests", TASKS, ids=["asserts", "output"])
@pytest.mark.parametrize("name", JUDGES)
def test_code_cannot_replace_what_judges_it(name, tests):
    assert run_tests(JUDGES[name], tests, seconds=10) in ("failed", "killed")


def passes(name, tests):
    """Whether tests count a forgery as right, without a deadline where it does not wait for one."""
    return run_tests(FORGERIES[name], tests, seconds=1 if name in ENDED else 60) == "passed"


@pytest.mark.parametrize("name", FORGERIES)
def test_a_wrong_solution_cannot_forge_tests_that_are_cut_into_calls(name):
    assert not passes(name, cut(SQUARES))


@pytest.mark.parametrize("name", SOME_WHOLE)
def test_tests_that_run_whole_are_forged_in_the_known_ways(name):
    assert passes(name, OTHER_TESTS.get(name, SQUARES)) == (name in PASS_WHOLE)


@pytest.mark.parametrize("tests", ["SQUARES", "EQUAL", "CLOSE", "ALL", "TABLE", "UNITTEST", "RANDOM"])
def test_the_right_solution_passes_the_tests_that_are_forged(tests):
    tests = getattr(forgeries, tests)
    for judged in {tests, cut(tests) or tests}:
        assert run_tests("def f(x):\n    return x * x", judged, seconds=60) == "passed"


def test_a_question_is_not_sent_before_the_one_before_is_answered():
    seen = ("import os, re, select\ndef encode(text):\n    if select.select([3], [], [], 0.3)[0]:\n"
            "        return re.search(r\"decode\\('(.*)'\\)\", os.read(3, 9999).decode())[1]\n    return 'nothing'\n"
            "def decode(text):\n    return 'secret'")
    tests = "assert encode('secret') == 'nothing'\nassert decode('frperg') == 'secret'"
    assert run_tests(seen, cut(tests), seconds=60) == "passed", "it knew the argument of decode when encode was called"


def test_no_child_survives_its_worker(tmp_path):
    needs("seccomp")
    code = ("import sys\nsys.path.insert(0, sys.argv[1])\nfrom grpo.sandbox.run import *\n"
            "missing_parts()\nprint('here', flush=True)\nrun_tests('import time\\ntime.sleep(600)', '', seconds=500)")
    worker = subprocess.Popen([sys.executable, "-c", code, ROOT], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "TMPDIR": str(tmp_path)})
    with worker:
        assert worker.stdout.readline() == "here\n"
        child = soon(lambda: protected_child(worker.pid))
        worker.send_signal(signal.SIGKILL)
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
    """The value of a condition as soon as it is true. Fails after a minute."""
    for _ in range(1200):
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come true")
