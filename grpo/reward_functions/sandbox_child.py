"""The child of sandbox.py: gives up what it does not need, runs the code, runs the tests, and only then says the nonce.

It runs as a bare script in an isolated interpreter, and imports nothing of this repository.
"""

import _posixsubprocess
import json
import os
import resource
import runpy
import signal
import sys

REFUSED = frozenset(["os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "pty.spawn", "subprocess.Popen",
                     "os.kill", "os.killpg", "signal.pthread_kill",
                     "os.mkdir"])  # a tree deeper than Python's stack could not be cleaned up
ALLOWED = frozenset(["socket.__new__"])  # an event loop makes a pair for itself; to connect or bind one is refused
CHANGES = frozenset(["os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
                     "os.chown", "os.utime", "shutil.rmtree"])
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main():
    """A job comes in on standard input; out goes "ready", and its nonce if the code and its tests ran through."""
    job = json.load(sys.stdin.buffer)
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.environ.clear()  # Python itself sets LC_CTYPE where there is none
    limit(job["limits"])
    _posixsubprocess.fork_exec = refuse  # multiprocessing comes this way, past every audit event
    sys.addaudithook(guard(os.path.realpath(os.getcwd())))
    run("solution.py", "", {})  # limits too low for any code show here, before the parent hears that all is ready
    os.write(report, b"ready\n")
    names = run("solution.py", job["code"], {})
    run("tests.py", job["tests"], names)  # written only now: the code has not read them
    os.write(report, job["nonce"].encode())
    os._exit(0)  # nothing that the code left for the interpreter's end matters


def run(path, text, names):
    """Runs a text as a file that sees `names`. Returns the names it leaves, without the interpreter's own."""
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    names = runpy.run_path(path, init_globals=names)
    return {name: value for name, value in names.items() if not (name.startswith("__") and name.endswith("__"))}


def limit(limits):
    """Lowers the process's limits, given by name, as far as they are not lower already."""
    signal.alarm(limits["RLIMIT_CPU"])  # a sleeper ends even if its parent is gone
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(kind, (value, value))
        except (ValueError, OSError):
            if name != "RLIMIT_AS":  # macOS cannot set it
                raise


def guard(folder):
    """An audit hook that refuses processes, signals, network, foreign code, and changes to files outside `folder`.

    RLIMIT_NPROC alone would not do: it does not bind root.
    """
    def inside(path):
        path = os.path.realpath(os.fsdecode(path))
        return path == os.devnull or path.startswith(folder + os.sep)

    def hook(event, arguments):
        if event in REFUSED or event.startswith(("ctypes.", "socket.")) and event not in ALLOWED:
            refuse(event)
        if event in CHANGES or event == "open" and arguments[2] & WRITES:
            if not all(inside(path) for path in arguments[:2] if isinstance(path, (str, bytes))):
                refuse(event)

    return hook


def refuse(event, *arguments):
    raise PermissionError(f"the sandbox refuses {event}")


if __name__ == "__main__":
    main()
