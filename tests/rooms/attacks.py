"""Attacks on the sandbox of code_execution: code that tries to leave it, or to exhaust the machine.

An attack ends with an exception unless it succeeds, so the verdict "passed" means that it did. What it was after is
looked at from outside too.
"""

import contextlib
import ctypes
import os
import pathlib
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time

from grpo.sandbox import run as sandbox
from tests.rooms.attack_programs import CALLS, FILES, LIMITS


class Target:
    """What attacks are after, in this process and in a folder. harm() lists what they did to it."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        (self.folder / "kept").write_text("kept")
        (self.folder / "secret").write_text("secret")
        self.secret = ctypes.create_string_buffer(b"secret")
        self.signals = []
        self.servers = []
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


ATTACKS = FILES | CALLS | LIMITS
PART = dict.fromkeys(FILES, "Landlock") | dict.fromkeys(CALLS, "seccomp") | dict.fromkeys(LIMITS, "namespaces")
# Of the attacks that another part stops too, those that the namespaces stop alone; of LIMITS they stop one alone
BY_NAMESPACES = ("write", "delete", "write_by_dir_fd", "move_in", "folder", "fifo", "sqlite", "mode", "times",
                 "truncate", "attribute", "socket_file", "tcp", "udp", "abstract_socket", "memory_file", "environment",
                 "many_files")
ALONE = [*((name, PART[name]) for name in FILES | CALLS), *((name, "namespaces") for name in BY_NAMESPACES)]
ENDED = ("output", "recursion", "time", "ignored_signals")  # by the deadline, the limit on output or a crash
TASKS = ("assert solved == 7", [{"input": "", "output": "7"}])  # what JUDGES attack
UNPROTECTED = ("limit(int(", "protect(report", "signal.alarm(")


def attack(name, folder):
    """(verdict, what the attack harmed). Only the attacks in ENDED meet their deadline, however slow the machine is."""
    target = Target(folder)
    try:
        verdict = sandbox.run_tests(target.code(ATTACKS[name]), "pass", seconds=1 if name in ENDED else 60)
        return verdict, target.harm()
    finally:
        target.close()


def contained(name):
    """Whether an attack fails and harms nothing."""
    with tempfile.TemporaryDirectory() as folder:
        verdict, harm = attack(name, folder)
    return verdict in ("failed", "killed") and not harm


@contextlib.contextmanager
def protected_by(*parts, without=()):
    """Within, code runs under these parts of the kernel's protection alone, and a child without the lines that begin
    with these texts."""
    before = sandbox.CHILD, sandbox.chosen_parts
    with tempfile.TemporaryDirectory() as folder:
        sandbox.CHILD, sandbox.chosen_parts = child_without(folder, *without), lambda setting: list(parts)
        try:
            yield
        finally:
            sandbox.CHILD, sandbox.chosen_parts = before


def child_without(folder, *beginnings):
    """A copy of the child's script, with its neighbours, without its lines that begin so. Returns its path."""
    source = pathlib.Path(sandbox.__file__).parent
    for name in ("child.py", "kernel.py"):
        shutil.copy(source / name, folder)
    path = pathlib.Path(folder, "child.py")
    lines = path.read_text().split("\n")
    for beginning in beginnings:
        place, = (i for i, line in enumerate(lines) if line.strip().startswith(beginning))
        lines[place] = lines[place].partition(beginning)[0] + "pass"
    path.write_text("\n".join(lines))
    return str(path)


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


SUCCESS = 3  # the exit status that tells of it
