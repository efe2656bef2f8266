"""The child process of sandbox.py: limits itself, runs the code, runs the tests, and only then writes the nonce.

It runs as a script in an isolated interpreter and imports nothing of this repository.
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
                     "os.mkdir"])  # a very deep tree of folders could not be deleted afterwards
ALLOWED = frozenset(["socket.__new__"])  # event loops create a pair of sockets; connect and bind stay refused
CHANGES = frozenset(["os.remove", "os.rename", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
                     "os.chown", "os.utime", "shutil.rmtree"])
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main():
    """Reads a job from standard input; writes "ready", and then the job's nonce if code and tests ran to their end."""
    job = json.load(sys.stdin.buffer)
    report = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.environ.clear()  # not empty even here: Python sets LC_CTYPE
    limit(job["limits"])
    _posixsubprocess.fork_exec = refuse  # multiprocessing calls this, which has no audit event
    sys.addaudithook(guard(os.path.realpath(os.getcwd())))
    run("solution.py", "", {})  # fails here, before "ready", if the limits are too low for any code
    os.write(report, b"ready\n")
    names = run("solution.py", job["code"], {})
    run("tests.py", job["tests"], names)  # the file is written only now, so that the code could not read it
    os.write(report, job["nonce"].encode())
    os._exit(0)  # without the exit handlers that the code may have registered


def run(path, text, names):
    """Runs a text as a file with the global `names`. Returns its globals, without those of the form __name__."""
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)
    names = runpy.run_path(path, init_globals=names)
    return {name: value for name, value in names.items() if not (name.startswith("__") and name.endswith("__"))}


def limit(limits):
    """Sets the process's limits, given by name; a limit that is already lower stays."""
    signal.alarm(limits["RLIMIT_CPU"])  # ends code that only sleeps, even if the parent process has ended
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
    """An audit hook that refuses processes, signals, network, ctypes, and changes to files outside `folder`.

    RLIMIT_NPROC is not enough, because it does not limit root.
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
