"""The end of a script: a mistake of the user's is one line on stderr and an exit code, never a traceback."""

import errno
import os
import sys

from core.config import UsageError
from core.settings.user_code import is_own_error, one_line

UNUSABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG,
            errno.ELOOP}  # errors of the system that say why a file or folder cannot be read or written
LONGEST_ERROR = 2000  # characters


def print_error(text):
    """A line on stderr in one write; print writes the end of the line separately, and lines of several ranks mix."""
    sys.stderr.write(f"{one_line(text, LONGEST_ERROR)}\n")


def exit_code(main):
    """Calls main(argv) and returns the exit code; a mistake of the user's and an interrupt are one line on stderr.

    A ValueError or FileNotFoundError counts as the user's only if this repository's code raised it, an OSError if it
    names a file that cannot be used. A script that does not know --help itself prints its docstring.
    """
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        if isinstance(error, UsageError) and {"--help", "-h"} & set(sys.argv):
            print(sys.modules[main.__module__].__doc__.strip())
            return 0
        if isinstance(error, OSError) and error.filename is not None and error.errno in UNUSABLE:
            print_error(f"error: {error.filename}: {error.strerror}")
        elif is_own_error(error):
            print_error(f"error: {error}")
        else:
            raise
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return 130
    except SystemExit as stop:
        return stop.code
    return 0


def stdout_is_closed():
    """True if nobody reads the output any more. (If somebody does, they get an empty line.)"""
    try:
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def run_script(main):
    """Runs main(argv): a mistake of the user's is one line and exit code 1 (2 for usage), never a traceback.

    Output that is piped into a program that stops reading, such as head, ends the script quietly with exit code 141,
    as the signal SIGPIPE would. Output is flushed here: at the interpreter's exit it is too late to handle the error.
    """
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal for ASCII alone shows other letters as \u....
    try:
        code = exit_code(main)
        sys.stdout.flush()
    except BrokenPipeError:
        if not stdout_is_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit
        code = 141
    if code:
        raise SystemExit(code)
