"""How a script ends: its exit code, and one line on stderr."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from core.config import UsageError
from core.settings.script import exit_code
from tests.tiny import ROOT

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from core.settings.script import run_script
def main(argv):
    {body}
run_script(main)
"""


@pytest.fixture
def ends(monkeypatch):
    """(exit code, the writes to stderr) of a main that ends in an error."""
    def end(error, *arguments):
        def main(argv):
            if error is not None:
                raise error

        writes = []
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=writes.append))
        monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
        return exit_code(main), writes
    return end


@pytest.mark.parametrize(("error", "code", "line"), [
    (SystemExit(3), 3, None), (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    (UsageError("--x: no"), 2, "error: --x: no\n"), (ValueError("a=1\nis\0no"), 1, "error: a=1 is?no\n"),
    (FileNotFoundError("config file x does not exist"), 1, "error: config file x does not exist\n"),
    (PermissionError(13, "Permission denied", "x"), 1, "error: x: Permission denied\n"),
    (NotADirectoryError(20, "no folder", "x/y"), 1, "error: x/y: no folder\n")])
def test_a_mistake_of_the_users_is_one_line_in_one_write(ends, error, code, line):
    """In one write, so that the lines of two ranks do not mix."""
    assert ends(None) == (0, []) and ends(error) == (code, [line] if line else [])


def test_any_other_error_keeps_its_traceback(ends, monkeypatch):
    with pytest.raises(OSError, match="Input/output error"):
        ends(OSError(5, "Input/output error"))
    with pytest.raises(json.JSONDecodeError):  # a ValueError, but of a library
        exit_code(lambda argv: json.loads("[1"))


def test_a_script_that_knows_no_help_prints_its_docstring(ends, capsys):
    assert ends(UsageError("--help: expected a file"), "--help") == (0, [])
    assert capsys.readouterr().out.strip() == __doc__


def test_a_script_whose_reader_stops_ends_quietly_and_another_broken_pipe_is_not_hidden(tmp_path):
    bodies = {"lines": "[print('line', i) for i in range(200000)]", "worker": "raise BrokenPipeError('x')"}
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(SCRIPT.format(root=str(ROOT), body=body))
    piped = f"{sys.executable} {tmp_path}/lines.py | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("line 0\n", "", 141)
    done = subprocess.run([sys.executable, tmp_path / "worker.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "BrokenPipeError: x" in done.stderr
