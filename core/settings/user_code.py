"""Runs code of others, such as a user's config or reward: its errors become one line, and its time is limited."""

import os
import pathlib
import signal
import sysconfig
import threading
import traceback
import warnings
from contextlib import contextmanager

ROOT = str(pathlib.Path(__file__).resolve().parents[2])
OWN = tuple(os.path.join(ROOT, folder) + os.sep for folder in ("core", "grpo"))
LIBRARY = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
PACKAGES = {"site-packages", "dist-packages"}
OURS = (ValueError, FileNotFoundError)  # what this project raises for its users
MOST = 300  # characters of an error of others


class UserCodeError(ValueError):
    """An exception of the user's code: "FILE, line N: text of the line: type and text of the exception"."""

    @property
    def line(self):
        """FILE, line N"""
        return str(self).partition(": ")[0]


class OutOfTime(BaseException):
    """A time_limit is over. It is no Exception, so that user code which catches those does not go on."""


@contextmanager
def guarded(what, remedy):
    """Whatever a library raises within becomes a ValueError, "{what} ({the error}); {remedy}"; its warnings are hidden.
    A ValueError or FileNotFoundError that this project raises stays as it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        if type(error) in OURS and is_own_error(error):
            raise
        raise ValueError(f"{what} ({one_line(error)}); {remedy}") from error


@contextmanager
def naming_line_of(function, what=""):
    """An exception that a function raises within becomes a UserCodeError with the user's line, unless the function is
    this project's and no line of the user's has a part in it. what: the beginning of its text"""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # those of asyncio and of Rust extensions are no Exception
        frames = traceback.extract_tb(error.__traceback__)
        places = [(frame.filename, frame.lineno, frame.line) for frame in frames]
        if isinstance(error, SyntaxError) and error.filename and error.lineno:
            places.append((error.filename, error.lineno, error.text))
        lines = [f"{shortest(file)}, line {number}: {text}" for file, number, text in places if is_users(file)]
        if not lines and str(function.__module__).startswith(("core.", "grpo.")):
            raise
        kind, text = type(error).__name__, one_line(error)
        told = kind if text == kind else f"{kind}: {text}"
        line = one_line(lines[-1]) if lines else definition(function)
        raise UserCodeError(f"{line}: {what}{told}") from error


@contextmanager
def time_limit(seconds):
    """Raises OutOfTime within, after so many seconds; but not in a thread or on Windows, where signals do not reach."""
    def end(*_):
        raise OutOfTime(f"it was not done after {seconds} seconds")

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def definition(function):
    """"FILE, line N" of where a function is defined; the name of one without Python's code."""
    code = getattr(function, "__code__", None)
    if code is None:
        return getattr(function, "__name__", type(function).__name__)
    return f"{shortest(code.co_filename)}, line {code.co_firstlineno}"


def one_line(value, most=MOST, write=str):
    """str(value), or what `write` makes of it, in one printable line; of an exception without a text its type."""
    text = write(value)
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text[: most + 1].split()))
    if not line and isinstance(value, BaseException):
        return type(value).__name__
    return f"{line[:most]}..." if len(text) > most else line


def is_own_error(error):
    """True for an exception that is meant for the user: one of the kinds OURS that a line of this repository raised."""
    file = os.path.realpath(traceback.extract_tb(error.__traceback__)[-1].filename)
    return isinstance(error, OURS) and file.startswith(ROOT + os.sep) and PACKAGES.isdisjoint(file.split(os.sep))


def is_users(file):
    """True for a source file that belongs neither to this project nor to Python and its packages."""
    path = os.path.realpath(file)
    return not (path.startswith((LIBRARY, *OWN)) or file.startswith("<") or PACKAGES & set(path.split(os.sep)))


def shortest(file):
    """The path of a file from the working directory, if the file is in it."""
    return file.removeprefix(os.getcwd() + os.sep)
