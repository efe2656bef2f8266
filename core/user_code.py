"""Code of the user's that runs here, a config file or a reward: an error in it names the user's line, not ours."""

import functools
import inspect
import os
import pathlib
import sysconfig
import traceback

ROOT = str(pathlib.Path(__file__).resolve().parents[1])
LIBRARY = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep
INSTALLED = {"site-packages", "dist-packages"}


class UserCodeError(ValueError):
    """An exception of the user's code. line: "FILE, line N: its text"; what: the type of the exception and its text."""

    def __init__(self, line, what):
        super().__init__(line, what)
        self.line, self.what = line, what

    def __str__(self):
        return f"{self.line}: {self.what}"


def run_user_code(function, *arguments, **settings):
    """function(...). An exception becomes a UserCodeError, unless the user's code has no part in it. This is the one
    place that catches every exception: nobody knows what a user's code raises."""
    try:
        return function(*arguments, **settings)
    except (Exception, SystemExit) as error:  # of a worker process, SystemExit would end it without a word
        found = as_user_error(error, function)
        if found is None:
            raise
        raise found from error


def as_user_error(error, function):
    """An exception that `function` raised as a UserCodeError; None if neither the function nor a line that the
    exception passed through is the user's."""
    frames = [(frame.filename, frame.lineno, frame.line) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        frames.append((error.filename, error.lineno, (error.text or "").strip()))
    lines = [f"{shortest(file)}, line {number}: {text}" for file, number, text in frames if is_users(file)]
    place = lines[-1] if lines else definition(function)
    what = " ".join(str(error).split())[:300]
    return place and UserCodeError(place, f"{type(error).__name__}: {what}" if what else type(error).__name__)


def definition(function):
    """"FILE, line N" of where a function of the user's is defined; nothing for one of this project or a library."""
    function = function.func if isinstance(function, functools.partial) else inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(getattr(type(function), "__call__", None), "__code__", None)
    return f"{shortest(code.co_filename)}, line {code.co_firstlineno}" if code and is_users(code.co_filename) else None


def is_users(file):
    """Whether a source file belongs neither to this project nor to Python and its packages."""
    path = os.path.realpath(file)
    ours = path.startswith(tuple(os.path.join(ROOT, folder) + os.sep for folder in ("core", "grpo")))
    return not (ours or file.startswith("<") or path.startswith(LIBRARY) or INSTALLED & set(path.split(os.sep)))


def is_ours(file):
    """Whether a source file belongs to this repository, whatever links lead to it."""
    path = os.path.realpath(file)
    return path.startswith(ROOT + os.sep) and not INSTALLED & set(path.split(os.sep))


def shortest(file):
    """The path of a file from the working directory, if the file is in it."""
    return file.removeprefix(os.getcwd() + os.sep)
