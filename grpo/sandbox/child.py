"""The child process of run.py: it gives up what the code must not have, runs the code, and answers questions.

It runs as a script in an isolated interpreter and imports nothing of this repository but its two neighbours.

    child.py questions|program PARENT PARTS BYTES RLIMIT_NAME=VALUE...

It reads messages: the length in 8 bytes, a token of 32 characters, "exec" or "eval", and a text in Python. The first
message has the code. For questions, each message is answered with a line: the token, and the value of the text as a
Python literal ("None" for "exec"). For a program there is one message; the rest of the input is the program's own, and
so is its output after the line "ready".
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
    """Reads the code, runs it and answers, as the head of this file says."""
    job, report = 0, 1
    if kind == "questions":  # the code must not read the questions as its input, nor print into the answers
        job, report = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    if kind == "questions":
        os.dup2(null, 0)
        os.dup2(null, 1)
    os.environ.clear()  # not empty even here: Python sets LC_CTYPE
    sys.argv[:] = sys.orig_argv[:] = ["solution.py"]
    limit({name: int(value) for name, value in (text.split("=") for text in limits)})
    if sys.platform == "linux":
        protect(report, parts.split(","), int(parent), int(size))
    # Taken now, because the code can replace them where they are defined
    receive, run = receiver(job), runner()
    write, leave = os.write, os._exit
    original = dict(vars(builtins))
    token, how, code = receive()
    _posixsubprocess.fork_exec = refuse  # multiprocessing calls this, which has no audit event
    sys.addaudithook(guard(os.path.realpath(os.getcwd())))
    run(b"", "exec", new_module("solution"))  # fails here, before "ready", if the limits are too low for any code
    write(report, b"ready\n")
    if kind == "program":
        run(code, how, new_module("__main__"))
        return
    try:
        solution = new_module("solution")
        run(code, how, solution)
        vars(builtins).update(original)
        write(report, token + b"None\n")
        tests = new_module("tests", vars(solution))
        while request := receive():
            token, how, text = request
            write(report, token + literal(run(text, how, tests)).encode() + b"\n")
    finally:
        leave(0)  # without the exit handlers and hooks that the code may have set


def receiver(job, read=os.read):
    """A function that returns the next message as (token, "exec" or "eval", text); None after the last.

    Like `runner` it makes the function within itself, so that the code cannot replace what the function calls.
    """
    def exactly(count):
        data = b""
        while len(data) < count:
            part = read(job, count - len(data))
            if not part:
                break
            data += part
        return data

    def receive():
        message = exactly(int.from_bytes(exactly(8), "big"))
        if not message:
            return None
        return message[:32], message[32:36].decode(), message[36:]

    return receive


def runner(compile=compile, Function=types.FunctionType):
    """A function that runs a text in a module and returns its value."""
    def run(text, how, module):
        return Function(compile(text, f"{module.__name__}.py", how, dont_inherit=True), vars(module))()

    return run


def new_module(name, names=()):
    """A new module with the names, except those of the form __name__."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    public = {key: x for key, x in dict(names).items() if not (key.startswith("__") and key.endswith("__"))}
    vars(module).update(public, __builtins__=builtins)
    return module


def literal(x):
    """A value as a Python literal; "..." in the place of what has none. A value of a subclass becomes one of the class
    above it."""
    for kind in (bool, int, complex, str, bytes):
        if isinstance(x, kind):
            return kind.__repr__(x)
    if isinstance(x, float):
        return "..." if x != x else float.__repr__(x).replace("inf", "1e999")
    if isinstance(x, list):
        return "[" + ", ".join(map(literal, x)) + "]"
    if isinstance(x, tuple):
        return "(" + "".join(literal(part) + ", " for part in x) + ")"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(value)}" for key, value in x.items()) + "}"
    if isinstance(x, (set, frozenset, type({}.keys()))):
        return "{" + ", ".join(map(literal, x)) + "}" if x else "set()"
    return "None" if x is None else "..."


def protect(report, parts, parent, size):
    """Applies kernel.py. If the kernel refuses one of the parts, writes "errno text" to `report` and ends."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    import kernel
    import syscalls
    sys.path.remove(here)
    try:
        kernel.protect(parts, parent, size, syscalls.filter_program)
    except OSError as error:
        os.write(report, f"{error.errno} {error.filename}: {error.strerror}".encode())
        os._exit(1)
    for name in list(sys.modules):
        if name.startswith(("ctypes", "_ctypes")) or name in ("kernel", "syscalls"):
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
    # Held by the hook, so that the code cannot replace them
    realpath, isdir = os.path.realpath, os.path.isdir
    fsdecode, devnull = os.fsdecode, os.devnull
    refused, allowed = REFUSED, ALLOWED
    changes, writes = CHANGES, WRITES
    most, made = FOLDERS, [0]
    raise_error = refuse

    def inside(path):
        path = realpath(fsdecode(path))
        return path in (devnull, folder) or path.startswith(folder + "/")

    def hook(event, arguments):
        if event in refused or (event.startswith(("ctypes.", "socket.")) and event not in allowed):
            raise_error(event)
        if event == "import" and arguments[0].rpartition(".")[2] in ("ctypes", "_ctypes"):
            raise_error("import ctypes")
        if event == "os.mkdir":
            made[0] += 1
            if made[0] > most:
                raise_error(f"more than {most} folders")
        if event == "open":
            paths = [x for x in arguments[:1] if isinstance(x, (str, bytes))]
            is_change = arguments[2] & writes or (paths and isdir(paths[0]))  # through an open folder one can write
        else:
            paths = [x for x in arguments[:2] if isinstance(x, (str, bytes))]
            is_change = event in changes
        if is_change and not all(path in (":memory:", "") or inside(path) for path in paths):
            raise_error(event)

    return hook


def refuse(event, *arguments):
    raise PermissionError(errno.EPERM, f"the sandbox refuses {event}")


if __name__ == "__main__":
    main(*sys.argv[1:])
