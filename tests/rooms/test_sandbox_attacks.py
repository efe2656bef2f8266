"""Attacks on the machine are contained, and wrong solutions cannot forge tests that are cut into calls.

An attack ends with an exception unless it succeeds, so the verdict "passed" means that it did. What it was after is
looked at from outside too. Attacks and forgeries that succeed where nothing protects show that they try.
"""

import contextlib
import ctypes
import os
import pathlib
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from grpo.reward_functions.verify_code import cut
from grpo.sandbox import run as sandbox
from grpo.sandbox.run import missing_parts, run_tests
from tests.rooms import forgeries
from tests.rooms.attack_programs import CALLS, FILES, JUDGES, LIMITS
from tests.rooms.forgeries import ENDED, FORGERIES, OTHER_TESTS, PASS_WHOLE, SQUARES
from tests.tiny import ROOT

pytestmark = [pytest.mark.slow,  # it is the number of them that takes the time
              pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the sandbox")]
ATTACKS = FILES | CALLS | LIMITS
PART = dict.fromkeys(FILES, "Landlock") | dict.fromkeys(CALLS, "seccomp") | dict.fromkeys(LIMITS, "namespaces")
# Of the attacks that another part stops too, those that the namespaces stop alone; of LIMITS they stop one alone
BY_NAMESPACES = ("write", "delete", "write_by_dir_fd", "move_in", "folder", "fifo", "sqlite", "mode", "times",
                 "truncate", "attribute", "socket_file", "tcp", "udp", "abstract_socket", "memory_file", "environment",
                 "many_files")
ALONE = [*((name, PART[name]) for name in FILES | CALLS), *((name, "namespaces") for name in BY_NAMESPACES)]
TIMED = ("output", "recursion", "time", "ignored_signals")  # ended by the deadline, the limit on output or a crash
TASKS = ("assert solved == 7", [{"input": "", "output": "7"}])  # what JUDGES attack
UNPROTECTED = ("limit(int(", "protect(report", "signal.alarm(")
SUCCESS = 3  # the exit status that tells of it
SOME_BARE = ("write_by_dir_fd", "sqlite_attach", "memory_file", "signal_by_pidfd", "parent_memory", "fork", "tcp",
             "memory", "many_files")
SOME_WHOLE = ("equal object", "frames in f", "del before the tests", "bytecode", "isclose", "exit handler",
              "SystemExit in f", "pipe in ==", "code of the runner")


class Target:
    """What attacks are after, in this process and in a folder. harm() lists what they did to it."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        (self.folder / "kept").write_text("kept")
        (self.folder / "secret").write_text("secret")
        self.secret = ctypes.create_string_buffer(b"secret")
        self.signals, self.servers = [], []
        self.port = self.serve(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        self.serve(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", self.port))
        self.serve(socket.AF_UNIX, socket.SOCK_STREAM, str(self.folder / "server"))
        self.serve(socket.AF_UNIX, socket.SOCK_DGRAM, str(self.folder / "datagrams"))
        self.serve(socket.AF_UNIX, socket.SOCK_STREAM, f"\0attack{os.getpid()}")
        self.handler = signal.signal(signal.SIGUSR1, lambda number, frame: self.signals.append(number))
        self.before = self.state()

    def serve(self, family, kind, address):
        """A socket at an address that waits for what comes. Returns its port, if it has one."""
        server = socket.socket(family, kind)
        server.bind(address)
        if kind == socket.SOCK_STREAM:
            server.listen()
        server.setblocking(False)
        self.servers.append(server)
        return server.getsockname()[1] if family == socket.AF_INET else None

    def code(self, attack):
        """The attack, with the names of what it is after."""
        return (f"import os\nfolder, parent, port, address = {str(self.folder)!r}, {os.getpid()}, {self.port}, "
                f"{ctypes.addressof(self.secret)}\n{attack}")

    def state(self):
        """What must not change."""
        kept = self.folder / "kept"
        return {"files": sorted(os.listdir(self.folder)),
                "shared memory": os.path.exists(f"/dev/shm/attack{os.getpid()}"),
                "kept": kept.exists() and (kept.read_text(), kept.stat().st_mode, kept.stat().st_mtime),
                "limits": [resource.getrlimit(i) for i in range(7)],
                "priority": os.getpriority(os.PRIO_PROCESS, 0), "signals": len(self.signals),
                "scheduler": os.sched_getscheduler(0), "attributes": os.listxattr(self.folder)}

    def harm(self):
        """Names of what an attack changed, or reached."""
        time.sleep(0)  # a signal that has come is handled
        found = [name for name, x in self.state().items() if x != self.before[name]]
        for server in self.servers:
            with contextlib.suppress(BlockingIOError):
                server.accept() if server.type == socket.SOCK_STREAM else server.recv(1)
                found.append("connection")
        return found

    def close(self):
        signal.signal(signal.SIGUSR1, self.handler)
        for server in self.servers:
            server.close()


def contained(name):
    """Whether an attack fails and harms nothing. Those in TIMED alone meet their deadline, however slow the machine."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Target(folder)) as target:
        verdict = run_tests(target.code(ATTACKS[name]), "pass", seconds=1 if name in TIMED else 60)
        return verdict in ("failed", "killed") and not target.harm()


@contextlib.contextmanager
def protected_by(*parts, without=()):
    """Within, code runs under these parts of the kernel's protection alone, in a copy of the child without the lines
    that begin with these texts."""
    source = pathlib.Path(sandbox.__file__).parent
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shutil.copy(source / "kernel.py", folder)
        lines = (source / "child.py").read_text().split("\n")
        for beginning in without:
            place, = (i for i, line in enumerate(lines) if line.strip().startswith(beginning))
            lines[place] = lines[place].partition(beginning)[0] + "pass"
        path = pathlib.Path(folder, "child.py")
        path.write_text("\n".join(lines))
        patch.setattr(sandbox, "CHILD", str(path))
        patch.setattr(sandbox, "chosen_parts", lambda setting: list(parts))
        yield


def succeeds_bare(name):
    """Whether an attack succeeds with no protection but the deadline, in another process, which it may end."""
    with tempfile.TemporaryDirectory() as place:  # the process may be ended before it has removed what it made
        process = os.fork()
        if process == 0:
            status = 1
            try:
                tempfile.tempdir = place
                sys.setrecursionlimit(10000)  # to remove deep folders
                with protected_by(without=UNPROTECTED):
                    status = 0 if contained(name) else SUCCESS
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status != 1, name
    return status != 0  # it may also have ended the process


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
