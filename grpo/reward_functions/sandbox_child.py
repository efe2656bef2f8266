"""The child process of sandbox.py: it gives up what the code must not have, runs the code, and then the tests.

It runs as a script in an isolated interpreter and imports nothing of this repository but its two neighbours.

    sandbox_child.py tests|program PARENT PARTS BYTES RLIMIT_NAME=VALUE...

It reads the length of the code, 8 bytes, and the code. Of a program, the rest of the input is the program's own, and so
is its output after "ready". Otherwise the child writes "ready" and "ended" around the code, and reads the tests, again
after their length, and then a nonce, which it writes if the tests ran to their end.
"""

import _posixsubprocess
import builtins
import errno
import os
import resource
import signal
import sys
import types

REFUSED = frozenset(["os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "pty.spawn", "subprocess.Popen",
                     "os.kill", "os.killpg", "signal.pthread_kill", "os.setxattr", "resource.prlimit", "sys.settrace",
                     "sys.setprofile", "gc.get_objects", "gc.get_referrers", "gc.get_referents",
                     "sqlite3.enable_load_extension", "sqlite3.load_extension"])
ALLOWED = frozenset(["socket.__new__"])  # event loops create a pair of sockets; connect and bind stay refused
CHANGES = frozenset(["os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
                     "os.chmod", "os.chown", "os.utime", "shutil.rmtree", "sqlite3.connect"])
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FOLDERS = 100        # folders that a program can make: a very deep tree could not be deleted afterwards


def main(kind, parent, parts, size, *limits):
    """Reads the code and runs it, as the head of this file says."""
    job, report = (0, 1) if kind == "program" else (os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    for number in (2,) if kind == "program" else (0, 1, 2):
        os.dup2(null, number)
    os.environ.clear()  # not empty even here: Python sets LC_CTYPE
    sys.argv[:] = sys.orig_argv[:] = ["solution.py"]
    limit({name: int(value) for name, value in (text.split("=") for text in limits)})
    if sys.platform == "linux":
        kernel(report, parts.split(","), int(parent), int(size))
    # Taken now, because the code can replace them where they are defined
    read, write, leave, run_text, original = received, os.write, os._exit, runner(), dict(vars(builtins))
    code = read(job)
    _posixsubprocess.fork_exec = refuse  # multiprocessing calls this, which has no audit event
    sys.addaudithook(guard(os.path.realpath(os.getcwd())))
    run_text(b"", "solution", {})  # fails here, before "ready", if the limits are too low for any code
    write(report, b"ready\n")
    if kind == "program":
        return run_text(code, "__main__", {})
    names = run_text(code, "solution", {})
    vars(builtins).update(original)
    write(report, b"ended\n")
    run_text(read(job), "tests", names)
    write(report, read(job))
    leave(0)  # without the exit handlers that the code may have registered


def received(job, read=os.read):
    """What the parent process sends next: 8 bytes with its length, then so many bytes."""
    def exactly(count):
        found = b""
        while len(found) < count and (part := read(job, count - len(found))):
            found += part
        return found

    return exactly(int.from_bytes(exactly(8), "big"))


def runner(compile=compile, Function=types.FunctionType, Module=types.ModuleType, modules=sys.modules):
    """A function that runs a text as a new module with the global `names`, and returns the module's globals without
    those of the form __name__. It holds what it needs, so that the code cannot replace it."""
    def run_text(text, name, names):
        module = Module(name)
        module.__dict__.update(names, __builtins__=builtins)
        modules[name] = module
        Function(compile(text, f"{name}.py", "exec", dont_inherit=True), module.__dict__)()
        return {key: x for key, x in module.__dict__.items() if not (key.startswith("__") and key.endswith("__"))}

    return run_text


def kernel(report, parts, parent, size):
    """What the kernel protects. If it refuses, reports "errno text" and ends."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    import sandbox_kernel
    import sandbox_syscalls
    sys.path.remove(here)
    try:
        sandbox_kernel.protect(parts, parent, size, sandbox_syscalls.filter_program)
    except OSError as error:
        os.write(report, f"{error.errno} {error.filename}: {error.strerror}".encode())
        os._exit(1)
    for name in [name for name in sys.modules if name.startswith(("ctypes", "_ctypes", "sandbox_"))]:
        del sys.modules[name]  # the guard refuses to import it again


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

    It gives Python code a clear error. Where the kernel does not protect, it is all there is, and code that is written
    to get around it can.
    """
    realpath, isdir, fsdecode, devnull, made = os.path.realpath, os.path.isdir, os.fsdecode, os.devnull, [0]
    refused, allowed, changes, writes, most, raise_error = REFUSED, ALLOWED, CHANGES, WRITES, FOLDERS, refuse

    def inside(path):
        path = realpath(fsdecode(path))
        return path in (devnull, folder) or path.startswith(folder + "/")

    def hook(event, arguments):
        if event in refused or event.startswith(("ctypes.", "socket.")) and event not in allowed:
            raise_error(event)
        if event == "import" and arguments[0].rpartition(".")[2] in ("ctypes", "_ctypes"):
            raise_error("import ctypes")
        if event == "os.mkdir":
            made[0] += 1
            if made[0] > most:
                raise_error(f"more than {most} folders")
        paths = [x for x in arguments[: 1 if event == "open" else 2] if isinstance(x, (str, bytes))]
        # A folder that is open could be written to through dir_fd
        if event in changes or event == "open" and (arguments[2] & writes or paths and isdir(paths[0])):
            if not all(path in (":memory:", "") or inside(path) for path in paths):
                raise_error(event)

    return hook


def refuse(event, *arguments):
    raise PermissionError(errno.EPERM, f"the sandbox refuses {event}")


if __name__ == "__main__":
    main(*sys.argv[1:])
