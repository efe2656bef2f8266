"""Runs a script: a mistake of the user's is one line on stderr and an exit code, never a traceback."""

import os
import sys

from core.config import UsageError
from core.settings.user_code import is_own_error, one_line


def exit_code(main):
    """Calls main(argv) and returns the exit code; a mistake of the user's and an interrupt are one line on stderr.

    A ValueError or FileNotFoundError counts as the user's only if this repository's code raised it, an OSError if it
    names a file. A script that does not know --help itself prints its docstring.
    """
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        if isinstance(error, UsageError) and {"--help", "-h"} & set(sys.argv):
            print(sys.modules[main.__module__].__doc__.strip())
            return 0
        line = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            line = f"{error.filename}: {error.strerror}"
        elif not is_own_error(error):
            raise
        sys.stderr.write(one_line(f"error: {line}", 2000) + "\n")  # at once: other ranks write there too
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:
        return stop.code
    return 0


def run_script(main):
    """Runs main(argv): a mistake of the user's is one line and exit code 1 (2 for usage), never a traceback."""
    sys.stdout.reconfigure(errors="backslashreplace")  # a terminal for ASCII alone shows other letters as \u....
    try:
        code = exit_code(main)
        sys.stdout.flush()
    except BrokenPipeError:  # of `| head`, which has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    if code:
        raise SystemExit(code)
