"""How a script ends: its exit code, and one line on stderr."""

import json
import sys

import pytest

from core.config import UsageError
from core.settings.script import exit_code


@pytest.fixture
def ends(monkeypatch, capsys):
    """(exit code, stderr) of a main that ends in an error."""
    def end(error, *arguments):
        def main(argv):
            if error is not None:
                raise error

        monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
        return exit_code(main), capsys.readouterr().err
    return end


@pytest.mark.parametrize(("error", "code", "line"), [
    (None, 0, ""), (SystemExit(3), 3, ""), (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    (UsageError("--x: no"), 2, "error: --x: no\n"), (ValueError("a=1\nis no"), 1, "error: a=1 is no\n"),
    (FileNotFoundError("config file x does not exist"), 1, "error: config file x does not exist\n"),
    (PermissionError(13, "Permission denied", "x"), 1, "error: x: Permission denied\n")])
def test_a_mistake_of_the_users_is_one_line_and_an_exit_code(ends, error, code, line):
    assert ends(error) == (code, line)


def test_any_other_error_keeps_its_traceback(ends):
    with pytest.raises(OSError, match="Input/output error"):
        ends(OSError(5, "Input/output error"))
    with pytest.raises(json.JSONDecodeError):  # a ValueError, but of a library
        exit_code(lambda argv: json.loads("[1"))
