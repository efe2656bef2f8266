"""Attacks on the sandbox of code_execution: code that tries to leave it, to exhaust the machine, or to pass tests that
it does not solve.

python tests/attacks.py            runs each attack under all protection, under the one part of the kernel's that should
                                   stop it, and without protection in a process that it may harm; prints a table, and
                                   exits with 1 if one succeeds under protection

An attack ends with an exception unless it succeeds, so the verdict "passed" means that it did. What it was after is
looked at from outside too. tests/grpo/sandbox/test_run_attacks.py runs all of them under all protection, and some of
them under one part and without protection.
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

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from grpo.sandbox import run as sandbox

HERE = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
NATIVE = HERE + ("def call(x86_64, aarch64, *a):\n    number = x86_64 if os.uname().machine == 'x86_64' else aarch64\n"
                 "    a = [ctypes.c_long(x) if isinstance(x, int) else x for x in a]\n"
                 "    if (result := libc.syscall(number, *a)) < 0:\n        raise OSError(ctypes.get_errno(), str(a))\n"
                 "    return result\n")
# On files and processes outside. Landlock alone stops them
FILES = {
    "write": "open(f'{folder}/new', 'w').write('x')",
    "append": "open(f'{folder}/kept', 'a').write('x')",
    "delete": "os.remove(f'{folder}/kept')",
    "write_by_dir_fd": "d = os.open(folder, os.O_RDONLY)\nos.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=d)",
    "delete_by_dir_fd": "d = os.open(folder, os.O_PATH)\nos.remove('kept', dir_fd=d)",
    "write_after_chdir": "os.chdir(folder)\nopen('new', 'w').write('x')",
    "symlink_out": "os.symlink(f'{folder}/kept', 'link')\nopen('link', 'a').write('x')",
    "hard_link_in": "os.link(f'{folder}/kept', 'mine')",
    "move_in": "os.rename(f'{folder}/kept', 'mine')",
    "move_out": "open('mine', 'w').write('x')\nos.rename('mine', f'{folder}/new')",
    "folder": "os.mkdir(f'{folder}/new')",
    "fifo": "os.mkfifo(f'{folder}/new')",
    "node": "os.mknod(f'{folder}/new')",
    "sqlite": "import sqlite3\nsqlite3.connect(f'{folder}/new').execute('create table t (x)')",
    "sqlite_attach": "import sqlite3\nc = sqlite3.connect(':memory:')\nc.execute(f\"attach '{folder}/new' as a\")\n"
                     "c.execute('create table a.t (x)')",
    "shared_memory": "import _posixshmem\n_posixshmem.shm_open(f'/attack{parent}', os.O_CREAT | os.O_RDWR, mode=0o600)",
    "read_secret": "assert open(f'{folder}/secret').read() == 'secret'",
    "read_by_link": "os.symlink(f'{folder}/secret', 'link')\nassert open('link').read() == 'secret'",
    "read_by_proc": "assert open(f'/proc/self/root{folder}/secret').read() == 'secret'",
    "read_users": "assert 'root' in open('/etc/passwd').read()",
    "list_folder": "assert 'secret' in os.listdir(folder)",
    "environment": "assert b'=' in open(f'/proc/{parent}/environ', 'rb').read()",
    "open_files": "assert os.listdir(f'/proc/{parent}/fd')",
    "processes": "assert str(parent) in os.listdir('/proc')",
    "memory_file": "f = open(f'/proc/{parent}/mem', 'rb', 0)\nf.seek(address)\nassert f.read(6) == b'secret'",
    "program": "for n in (3, 4):\n    os.set_inheritable(n, True)\n"
               "os.execv('/bin/sh', ['sh', '-c', f'echo x > {folder}/new'])",
}
# seccomp alone stops them
CALLS = {
    "mode": "os.chmod(f'{folder}/kept', 0o777)",
    "times": "os.utime(f'{folder}/kept', (1, 1))",
    "truncate": "os.truncate(f'{folder}/kept', 0)",
    "attribute": "os.setxattr(f'{folder}/kept', 'user.x', b'x')",
    "socket_file": "import socket\nsocket.socket(socket.AF_UNIX).bind(f'{folder}/new')",
    "signal": "os.kill(parent, 10)",
    "signal_by_pidfd": "import signal\nsignal.pidfd_send_signal(os.pidfd_open(parent), 10)",
    "signal_by_file": "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, 8, parent)\nfcntl.fcntl(r, 10, 10)\n"
                      "fcntl.fcntl(r, 4, 0o20000)\nos.write(w, b'x')",
    "signal_by_queue": NATIVE + "b = ctypes.create_string_buffer(128)\nctypes.c_int.from_buffer(b, 8).value = -1\n"
                                "call(129, 138, parent, 10, b)",
    "limits_of_parent": "import resource\nresource.prlimit(parent, resource.RLIMIT_CORE, (0, 0))",
    "priority_of_parent": "os.setpriority(os.PRIO_PROCESS, parent, 19)",
    "scheduler_of_parent": "os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0))",
    "raised_limit": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))",
    "ptrace": NATIVE + "call(101, 117, 0x4206, parent, 0, 0)",
    "parent_memory": NATIVE + "b = ctypes.create_string_buffer(6)\n"
                              "here = (ctypes.c_size_t * 2)(ctypes.addressof(b), 6)\n"
                              "there = (ctypes.c_size_t * 2)(address, 6)\n"
                              "call(310, 270, parent, here, 1, there, 1, 0)\nassert b.raw == b'secret'",
    "parent_files": NATIVE + "call(438, 438, os.pidfd_open(parent), 0, 0)",
    "io_uring": NATIVE + "call(425, 425, 4, ctypes.create_string_buffer(120))",
    "namespace": HERE + "if libc.unshare(0x10000000):\n    raise OSError('unshare')",
    "outlive": HERE + "if libc.prctl(1, 0, 0, 0, 0):\n    raise OSError('prctl')",
    "chroot": "os.chroot('.')",
    "fork": "if os.fork() == 0:\n    os._exit(0)",
    "fork_bomb": "import time\nfor _ in range(50):\n    if os.fork() == 0:\n        time.sleep(1)\n        os._exit(0)",
    "double_fork": "import time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1)\n"
                   "        open(f'{folder}/new', 'w')\n    os._exit(0)",
    "clone": NATIVE + "if call(56, 220, 17, 0, 0, 0, 0) == 0:\n    os._exit(0)",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/true'], check=True)",
    "posix_spawn": "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)",
    "thread": "import threading\nthreading.Thread(target=print).start()",
    "memory_in_a_file": "f = os.memfd_create('x')\nfor _ in range(20):\n    os.write(f, bytes(1 << 20))",
    "tcp": "import socket\nsocket.create_connection(('127.0.0.1', port), 2).send(b'x')",
    "udp": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))",
    "listen": "import socket\nsocket.create_server(('127.0.0.1', 0))",
    "unix_socket": "import socket\nsocket.socket(socket.AF_UNIX).connect(f'{folder}/server')",
    "unix_datagram": "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', "
                     "f'{folder}/datagrams')",
    "abstract_socket": "import socket\nsocket.socket(socket.AF_UNIX).connect(f'\\0attack{parent}')",
}
# Limits stop them, of the process, the folder or time
LIMITS = {
    "memory": "import mmap\nmmap.mmap(-1, 10 ** 9, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)",
    "large_file": "with open('big', 'wb') as f:\n    f.write(bytes(2 << 20))",
    "many_files": "import time\nfor i in range(40):\n    open(f'{i}', 'wb').write(bytes(1 << 20))\ntime.sleep(0.5)",
    "nested_names": "import time\nd = os.open('.', os.O_RDONLY)\nfor i in range(50):\n"
                    "    os.mkdir('x' * 250, dir_fd=d)\n    d, old = os.open('x' * 250, os.O_RDONLY, dir_fd=d), d\n    os.close(old)\nfor i in range(40):\n"
                    "    f = os.open(f'{i}', os.O_CREAT | os.O_WRONLY, dir_fd=d)\n    os.write(f, bytes(1 << 20))\n"
                    "    os.close(f)\ntime.sleep(0.5)",
    "hidden_folder": "import time\nos.mkdir('x')\nos.chmod('x', 0o300)\nfor i in range(40):\n"
                     "    open(f'x/{i}', 'wb').write(bytes(1 << 20))\ntime.sleep(0.5)",
    "empty_files": "import time\nfor i in range(3000):\n    open(f'{i}', 'wb').close()\ntime.sleep(0.5)",
    "deep_folders": "for _ in range(1500):\n    os.mkdir('x')\n    os.chdir('x')",
    "descriptors": "x = [os.dup(0) for _ in range(100)]",
    "output": "while True:\n    os.write(4, b'x' * 1000)",
    "recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\nf = lambda x: f(x) + 1\nf(0)",
    "time": "import time\ntime.sleep(10 ** 6)",
    "ignored_signals": "import signal, time\nfor s in (1, 2, 14, 15):\n    signal.signal(s, signal.SIG_IGN)\n"
                       "while True:\n    try:\n        time.sleep(10 ** 6)\n    except BaseException:\n        pass",
}
# On what judges: the tests are `assert solved == 7`, or the number 7 is expected as output
JUDGES = {
    "runpy": "import runpy\nrunpy.run_path = lambda *a, **k: {}",
    "compile": "import builtins\nbuiltins.compile = lambda *a, **k: (lambda: 0).__code__",
    "function": "import types\ntypes.FunctionType = lambda *a, **k: lambda: None",
    "assertion": "import builtins\nbuiltins.AssertionError = KeyError\nbuiltins.__import__ = None",
    "main": "import sys\nm = sys.modules['__main__']\n"
            "for n in ('receiver', 'runner', 'literal', 'new_module', 'refuse', 'guard'):\n    setattr(m, n, lambda *a, **k: {})",
    "modules": "import sys\nfor m in ('os', 'builtins', 'types', 'sys'):\n    sys.modules[m] = None",
    "exit": "import os\nos._exit(0)",
    "exit_handler": "import atexit, os\natexit.register(os._exit, 0)",
    "system_exit": "raise SystemExit(0)",
    "os_exit_replaced": "import os\nleave = os._exit\nos._exit = lambda *a: leave(0)\nos.write = lambda *a: 0\n"
                        "os.read = lambda *a: b''",
    "trace": "import sys\nsys.settrace(lambda *a: None)\nsys._getframe(1).f_trace = lambda f, *a: f",
    "search": "import gc\n[x for x in gc.get_objects() if isinstance(x, str)]",
    "answered_twice": "import os\nfor n in range(3, 20):\n    try:\n        os.write(n, b'None\\nNone\\n')\n"
                   "    except OSError:\n        pass",
    "close": "import os\nos.closerange(0, 100)",
    "printed_verdict": "print('passed', 'ready', 'None', sep='\\n', flush=True)",
}


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
        if sys.platform == "linux":
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
        found = {"files": sorted(os.listdir(self.folder)),
                 "shared memory": os.path.exists(f"/dev/shm/attack{os.getpid()}"),
                 "kept": kept.exists() and (kept.read_text(), kept.stat().st_mode, kept.stat().st_mtime),
                 "limits": [resource.getrlimit(i) for i in range(7)],
                 "priority": os.getpriority(os.PRIO_PROCESS, 0), "signals": len(self.signals)}
        if hasattr(os, "sched_getscheduler"):
            found |= {"scheduler": os.sched_getscheduler(0), "attributes": os.listxattr(self.folder)}
        return found

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
GUARD = ("sys.addaudithook(", "_posixsubprocess.fork_exec = ")
UNPROTECTED = (*GUARD, "limit({", "protect(report", "signal.alarm(")


def attack(name, folder):
    """(verdict, what the attack harmed). Only the attacks in ENDED meet their deadline, however slow the machine is."""
    target = Target(folder)
    try:
        verdict = sandbox.run_tests(target.code(ATTACKS[name]), "pass", seconds=2 if name in ENDED else 60)
        return verdict, target.harm()
    finally:
        target.close()


def contained(name):
    """Whether an attack fails and harms nothing."""
    with tempfile.TemporaryDirectory() as folder:
        verdict, harm = attack(name, folder)
    return verdict in ("failed", "killed") and not harm


@contextlib.contextmanager
def protected_by(*parts, without=GUARD):
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
    for name in ("child.py", "kernel.py", "syscalls.py"):
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
                tempfile.tempdir, sandbox.PLACE[:] = place, [place]
                sandbox.holds_more = lambda *given: False
                with protected_by(without=UNPROTECTED):
                    status = 0 if contained(name) else SUCCESS
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert status != 1, name
    return status != 0  # it may also have ended the process


SUCCESS = 3  # the exit status that tells of it


def main():
    """Runs every attack and prints the table."""
    print(sandbox.describe_sandbox("auto", 3, 256))
    offered = sandbox.chosen_parts("auto")
    succeeded = []
    for name in ATTACKS:
        found = {"all": contained(name)}
        for part in [part for attack, part in ALONE if attack == name and part in offered]:
            with protected_by(part):
                found[part] = contained(name)
        succeeded += [f"{name} ({part})" for part, held in found.items() if not held]
        bare = "succeeds" if succeeds_bare(name) else "fails"
        held = ", ".join(part for part, held in found.items() if held)
        print(f"{name:<22}contained by: {held:<32} unprotected: {bare}", flush=True)
    for name, code in JUDGES.items():
        verdicts = {sandbox.run_tests(code, tests, seconds=10) for tests in TASKS}
        if "passed" in verdicts:
            succeeded.append(name)
        print(f"{name:<22}{' '.join(sorted(verdicts))}")
    print(f"{len(ATTACKS) + len(JUDGES)} attacks, succeeded under protection: {', '.join(succeeded) or 'none'}")
    sys.exit(bool(succeeded))


if __name__ == "__main__":
    main()
