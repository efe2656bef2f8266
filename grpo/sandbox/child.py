"""The child process, which sandboxes itself, runs untrusted code, and answers questions about it.

It runs as a script in an isolated interpreter; kernel.py is the only file of this repository that it imports.

    child.py questions|program PARENT PARTS SECONDS MEGABYTES

It reads messages: the length in 8 bytes, a token of 32 characters, "exec" or "eval", and Python code. The first message
is the model's code. For "questions", it answers each message with a line: the token, and the value as a Python literal
("None" for "exec"). For "program", there is one message; the program reads the rest of the input and writes the output
after the word "ready".
"""

import builtins
import os
import resource
import signal
import sys
import types


def main(kind, parent, parts, seconds, megabytes):
    """Reads the code, runs it and answers, as described above."""
    job = os.dup(0)
    report = os.dup(1)
    if kind == "questions":  # the code must not read questions or write answers
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
    os.environ.clear()  # not empty even here: Python sets LC_CTYPE
    sys.argv[:] = sys.orig_argv[:] = ["solution.py"]
    limit(int(seconds), int(megabytes))
    protect(report, parts, int(parent))
    # Saved now, because the code can replace them in their modules
    receive = receiver(job)
    run = runner()
    write = os.write
    leave = os._exit
    original = dict(vars(builtins))
    token, how, code = receive()
    run(b"", "exec", new_module("solution"))  # fails here, before "ready", if the limits are too low for any code
    write(report, b"ready")
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
        leave(0)  # skips exit handlers and hooks that the code may have set


def receiver(job, read=os.read):
    """Returns a function that reads the next message as (token, "exec" or "eval", text); None after the last message.
    Like `runner`, it returns a closure, so that the code cannot replace the functions that the closure calls."""
    def exactly(count):
        data = b""
        while part := read(job, count - len(data)):
            data += part
        return data

    def receive():
        message = exactly(int.from_bytes(exactly(8), "big"))
        if not message:
            return None
        return message[:32], message[32:36].decode(), message[36:]

    return receive


def runner(compile=compile, Function=types.FunctionType):
    """Returns a function that runs code in a module and returns its value."""
    def run(text, how, module):
        return Function(compile(text, f"{module.__name__}.py", how, dont_inherit=True), vars(module))()

    return run


def new_module(name, names=()):
    """Creates a module with these names, except names of the form __name__."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    for key, x in dict(names).items():
        if not (key.startswith("__") and key.endswith("__")):
            vars(module)[key] = x
    vars(module)["__builtins__"] = builtins
    return module


def literal(x):
    """Formats a value as a Python literal, or as "..." if it has none. Subclasses are formatted as their base class.

    repr() would call a method of the value's class, which the untrusted code may define.
    """
    for kind in (bool, int, complex, str, bytes, type(None)):
        if isinstance(x, kind):
            return kind.__repr__(x)
    if isinstance(x, float):
        return float.__repr__(x).replace("inf", "1e999").replace("nan", "...")
    if isinstance(x, dict):
        return "{" + "".join(f"{literal(key)}: {literal(value)}, " for key, value in x.items()) + "}"
    if isinstance(x, (list, tuple, set, frozenset, type({}.keys()))):
        parts = "".join(f"{literal(part)}, " for part in x)
        if isinstance(x, list):
            return f"[{parts}]"
        if isinstance(x, tuple):
            return f"({parts})"
        return f"{{{parts}}}" if parts else "set()"
    return "..."


def protect(report, parts, parent):
    """Applies the sandbox of kernel.py. If the kernel refuses a part, writes "errno text" to `report` and exits."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import kernel
    del sys.path[0]
    try:
        kernel.protect(parts.split(","), parent)
    except OSError as error:
        os.write(report, f"{error.errno} {error.filename}: {error.strerror}".encode())
        os._exit(1)


def limit(seconds, megabytes):
    """Lowers the resource limits of the process."""
    signal.alarm(seconds)  # ends code that sleeps, even if the parent process has ended
    lower(resource.RLIMIT_FSIZE, 1 << 20)
    lower(resource.RLIMIT_NOFILE, 32)
    lower(resource.RLIMIT_NPROC, 0)
    lower(resource.RLIMIT_CORE, 0)
    lower(resource.RLIMIT_CPU, seconds)
    lower(resource.RLIMIT_AS, megabytes << 20)


def lower(kind, value):
    """Lowers the soft and the hard limit to a value, or to the current hard limit if that is lower."""
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(hard, value)
    resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main(*sys.argv[1:])
