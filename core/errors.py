"""User mistakes end a script with a one-line error; bugs of this project keep their traceback.

This project raises a Mistake for a wrong input. An exception in foreign code (a library that reads a user's file, a
reward, an environment, a mask, a config) becomes a Mistake in a block of `others`. Every other exception is a bug of
this project.
"""

import inspect
import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

CORE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(CORE)
USER_FILES = "core.user_files."  # prefix of the module names of the user's files
OWN = (CORE + os.sep, os.path.join(ROOT, "grpo") + os.sep)
# Files of this project that only pass on calls: an exception in their functions belongs to the code that they call
PASSING_ON = (os.path.join(CORE, "errors.py"), os.path.join(CORE, "user_files.py"))
LIBRARY = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
PACKAGES = {"site-packages", "dist-packages"}
MOST_SHOWN = 300  # most characters of an error of foreign code
HELP = {"--help", "-h", "--help=all"}
FLOORS = {  # {module: the oldest version of its package that was tried}
    "torch": "2.11", "torch.distributed.fsdp": "2.13", "transformers": "5.17", "peft": "0.19"}
NO_MEMORY = "out of memory|can't allocate memory|ALLOC_FAILED"  # of CUDA and MPS, of a CPU, of CUDA's libraries


class Mistake(ValueError):
    """A user mistake. Its text is one line that names the key or the file, and the remedy."""
    exit_code = 1


class UsageError(Mistake):
    """A mistake in the command itself."""
    exit_code = 2


class OutOfTime(BaseException):
    """A time_limit has expired. It is not an Exception, so that user code that catches every Exception ends, too."""


class others:
    """Turns an exception of foreign code in the block into a Mistake, "{what} ({the exception}); {remedy}".

    The Mistake begins with the innermost line of the user's code in the traceback, or else with `place`, such as the
    definition of the user's function. An interrupt passes unchanged. If no line of the user's is in the traceback, so
    do a Mistake, an out-of-memory error, and a bug of this project, which is an exception in one of its functions that
    the block calls. An exception in a line of the block itself counts as foreign, so the block should only call foreign
    code.

    quiet: hides warnings
    ours_too: an exception in a function of this project counts as foreign, too. For models and package versions that
        nobody has tried
    """

    def __init__(
            self,
            what: str,
            remedy: str,
            place: str = "",
            quiet: bool = False,
            ours_too: bool = False):
        self.what = what
        self.remedy = remedy
        self.place = place
        self.ours_too = ours_too
        self.warnings = warnings.catch_warnings(action="ignore") if quiet else nullcontext()

    def __enter__(self):
        self.warnings.__enter__()

    def __exit__(self, kind, error, trace):
        self.warnings.__exit__(kind, error, trace)
        if error is None or isinstance(error, KeyboardInterrupt):
            return
        block, *called = traceback.extract_tb(trace)
        # A comprehension or lambda of the block has its own frame, comprehensions only in some versions of Python
        while called and called[0].filename == block.filename and called[0].name.startswith("<"):
            called.pop(0)
        is_bug = called and is_ours(called[-1].filename) and not self.ours_too
        if isinstance(error, SyntaxError) and error.filename and error.lineno:  # in a file that was not run
            line = error.text or ""
            called.append(traceback.FrameSummary(error.filename, error.lineno, "", line=line))
        users = [frame for frame in called if is_users(frame.filename)]
        if not users and (is_bug or isinstance(error, Mistake) or is_out_of_memory(error)):
            return
        place = self.place
        if users:
            frame = users[-1]
            place = one_line(f"{shortest(frame.filename)}, line {frame.lineno}: {frame.line}")
        what = f"{place}: {self.what}" if place else self.what
        raise Mistake(f"{what} ({described(error)}); {self.remedy}") from error


def calling(function: Callable, what: str) -> AbstractContextManager:
    """Returns the context for calling a function that may be the user's: `others`, or a null context for ours."""
    if is_own_function(function):
        return nullcontext()
    return others(what, "correct it", definition(function))


@contextmanager
def time_limit(seconds: float) -> Iterator:
    """Raises OutOfTime in the block after so many seconds. In a thread and on Windows, where there is no such signal,
    it does nothing."""
    def end(*_):
        raise OutOfTime(f"it was not done after {seconds} seconds")

    in_main_thread = threading.current_thread() is threading.main_thread()
    if os.name == "nt" or not in_main_thread:
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_version(name: str, found: str, why: str, install: str) -> None:
    """Raises Mistake if the version `found` is below the floor of a module. A development version of the floor passes.

    why: the setting that needs the module; install: the arguments of pip install
    """
    floor = FLOORS[name]
    if release(found) < release(floor):
        package = name.split(".")[0]
        raise Mistake(f"{why} needs {package} {floor} or later, not {found}: pip install {install}")


def release(version: str) -> list[int]:
    """Returns the first two numbers of a version: [2, 13] for 2.13.0+cpu or 2.13.0a0+git."""
    numbers = re.findall(r"\d+", version)
    return [int(number) for number in numbers[:2]]


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory exception of Python or torch."""
    if isinstance(error, RuntimeError):
        return re.search(NO_MEMORY, str(error)) is not None
    return isinstance(error, MemoryError)


def is_own_function(function: Callable) -> bool:
    """True for a function that a file of this project defines."""
    module = str(getattr(function, "__module__", ""))
    return module.startswith(("core.", "grpo.")) and not module.startswith(USER_FILES)


def is_ours(file: str) -> bool:
    """True for a source file of this project, except those that only pass on calls."""
    path = os.path.realpath(file)
    return path.startswith(OWN) and path not in PASSING_ON


def is_users(file: str) -> bool:
    """True for a source file that belongs neither to this project nor to Python and its packages."""
    path = os.path.realpath(file)
    if file.startswith("<") or path.startswith((LIBRARY, *OWN)):
        return False
    return PACKAGES.isdisjoint(path.split(os.sep))


def definition(function: Callable) -> str:
    """The place of the definition, "FILE, line N", of a function, or of the first method of a class or of an object. If
    there is none, the name."""
    kind = function if isinstance(function, type) else type(function)
    # Not by inspect, which parses the user's whole file for a class, and reads attributes of the user's object
    parts = [function]
    for base in kind.__mro__:
        parts += vars(base).values()
    for part in parts:
        if isinstance(part, types.MethodType):
            part = part.__func__
        if isinstance(part, types.FunctionType):
            return f"{shortest(part.__code__.co_filename)}, line {part.__code__.co_firstlineno}"
    return getattr(function, "__name__", kind.__name__)


def parameters_of(function: Callable, named: str) -> list[str]:
    """Lists the parameters of a function that may be the user's. named: the setting that names it"""
    with others(f"the parameters of {named} cannot be read", "write it in Python", definition(function)):
        return list(inspect.signature(function).parameters)


def shortest(file: str) -> str:
    """Returns a path relative to the working directory if the file is in it; other paths are unchanged."""
    try:
        return file.removeprefix(os.getcwd() + os.sep)
    except FileNotFoundError:  # a user's function may have changed to a folder that was deleted
        return file


def described(error: BaseException) -> str:
    """Describes an exception in one line, by its type and text; a Mistake only by its text."""
    message = error.msg if isinstance(error, SyntaxError) else error  # str(error) would repeat its place
    text = one_line(message)
    if isinstance(error, Mistake):
        return text
    # A module beside the user's file is shown by the name that the file imports, `helper`
    text = re.sub(re.escape(USER_FILES) + r"[^.'>\s]+\.?", "", text)
    kind = one_line(type(error).__name__)
    return f"{kind}: {text}" if text else kind


def one_line(value: object, most: int = MOST_SHOWN, write: Callable = str) -> str:
    """Writes a value as one printable line. most: its most characters; write: turns the value into a text"""
    try:
        text = write(value)
    except (Exception, SystemExit):  # a user's class may fail to write itself
        text = f"a {type(value).__name__} that cannot be written as text"
    words = " ".join(text[: most + 1].split())
    line = "".join(c if c.isprintable() else "?" for c in words)
    return f"{line[:most]}..." if len(text) > most else line


def exit_code(main: Callable) -> int:
    """Calls main(argv) and returns the exit code.

    For a Mistake, a file that cannot be opened, an out-of-memory error or an interrupt, it prints one line on stderr; a
    bug is not caught. --help prints the docstring of the script before main is called: main then lists its settings or,
    without settings, refuses the argument.
    """
    wants_help = not HELP.isdisjoint(sys.argv)
    if wants_help:
        text = sys.modules[main.__module__].__doc__ or ""  # python -OO has none
        print(text.strip())
    try:
        main(sys.argv[1:])
    except Mistake as mistake:
        if wants_help and isinstance(mistake, UsageError):
            return 0
        tell(mistake)
        return mistake.exit_code
    except OSError as error:
        if error.filename is None:
            raise
        tell(f"{error.filename}: {error.strerror}")
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        tell(f"out of memory ({one_line(error, 100)}); use a smaller model or a machine with more")
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:
        return stop.code
    return 0


def tell(mistake: BaseException) -> None:
    """Writes the line of a mistake to stderr, in one call, because other ranks write there too."""
    line = one_line(f"error: {mistake}", most=5000)  # room for the forty keys of a command of another project
    sys.stderr.write(line + "\n")


def libraries_first(*folders) -> None:
    """Moves the root of this project to the end of sys.path and removes the folders from it. Otherwise a file there,
    such as a user's datasets.py, would hide a library that is imported later."""
    removed = (ROOT, *folders)
    libraries = [path for path in sys.path if os.path.realpath(path) not in removed]
    sys.path[:] = [*libraries, ROOT]


def run_script(main: Callable) -> None:
    """Runs main(argv). A user mistake ends in one line and exit code 1 (2 for usage), a bug in a traceback."""
    script = os.path.realpath(sys.argv[0])
    libraries_first(os.path.dirname(script))
    sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII-only terminal shows other letters as \u....
    try:
        code = exit_code(main)
        sys.stdout.flush()
    except BrokenPipeError:  # the next command, such as `| head`, has read enough
        # Python flushes its output at exit, which would raise another error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        code = 141
    if code:
        raise SystemExit(code)
