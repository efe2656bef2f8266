"""What a program can and cannot do in the sandbox: it never hangs, and never passes without its tests."""

import os
import time

import pytest

from grpo.reward_functions import sandbox
from grpo.reward_functions.sandbox import run_tests


@pytest.mark.parametrize(("code", "tests", "verdict"), [
    ("def f():\n    return 1", "assert f() == 1", "passed"),
    ("x = 'ü'\nprint(x, flush=True)", "assert x == '\\xfc'\nprint('passed')", "passed"),
    ("import asyncio\nasync def f():\n    return 1", "assert asyncio.run(f()) == 1", "passed"),
    ("open('a.txt', 'w').write('a')", "assert open('a.txt').read() == 'a'", "passed"),
    ("if __name__ == '__main__':\n    raise SystemExit", "pass", "passed"),
    ("def f():\n    return 1", "assert f() == 2", "failed"),
    ("def f(:", "pass", "failed"),
    ("x = '\0'", "pass", "failed"),
    ("x = '\ud800'", "pass", "failed"),
    ("", "f()", "failed"),
    ("input()", "pass", "failed"),
    ("import numpy", "pass", "failed"),
    ("def f(): f()", "f()", "failed"),
    ("print('passed'); print('ready')", "assert False", "failed"),
    ("raise SystemExit(0)", "pass", "failed"),
    ("import sys\nsys.exit(0)", "assert False", "failed"),
    ("def f():\n    raise SystemExit(0)", "f()\nassert False", "failed"),
    ("import os\nos._exit(0)", "assert False", "failed"),
    ("import atexit, os\natexit.register(os._exit, 0)", "assert False", "failed"),
    ("x = bytearray(10 ** 10)", "pass", "failed"),
    ("x = []\nwhile True:\n    x.append(bytearray(10 ** 6))", "pass", "failed"),
    ("with open('big', 'wb') as f:\n    f.write(bytes(2 ** 21))", "pass", "failed"),
    ("import os\nos.abort()", "pass", "killed"),
    ("import os\nos.closerange(0, 100)", "while True:\n    pass", "killed"),
])
def test_the_sandbox_passes_only_what_ran_to_its_end(code, tests, verdict):
    assert run_tests(code, tests) == verdict


@pytest.mark.slow
@pytest.mark.parametrize("code", [
    "while True:\n    pass", "while True:\n    print('x' * 10 ** 6)", "import time\ntime.sleep(10 ** 6)",
    "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
    "import signal\nfor s in range(1, 30):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n    except OSError:\n"
    "        pass\nwhile True:\n    pass"], ids=["loop", "print", "sleep", "catch", "ignore"])
def test_what_does_not_end_is_killed(code):
    start = time.monotonic()
    assert run_tests(code, "pass", seconds=1) == "killed"
    assert time.monotonic() - start < 10


def test_a_flood_of_output_is_cut_before_the_deadline():
    start = time.monotonic()
    assert run_tests("import os\nwhile True:\n    os.write(3, b'x' * 100)", "pass", seconds=60) == "killed"
    assert time.monotonic() - start < 30


def test_the_sandbox_leaves_no_folder_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    assert run_tests("import os\nopen('a', 'w')\nos.chmod('a', 0)", "pass") == "passed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_grandchild_does_not_survive(monkeypatch, tmp_path):
    child = tmp_path / "child.py"  # without the guard: it forks, and its child keeps the pipe open
    child.write_text("import os, sys, time\nif os.fork() == 0:\n    time.sleep(60)\nelse:\n"
                     f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpgid(0)))\n    os._exit(0)")
    monkeypatch.setattr(sandbox, "CHILD", str(child))
    assert run_tests("", "", seconds=1) == "killed"
    group = int((tmp_path / "pid").read_text())
    for _ in range(50):  # init collects an orphan after a while
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("the grandchild is alive")


def test_limits_too_low_for_the_sandbox_itself_are_an_error():
    with pytest.raises(ValueError, match="could not start with seconds=5.0 megabytes=1"):
        run_tests("x = 1", "pass", megabytes=1)


def test_a_huge_program_does_not_block_the_pipe():
    assert run_tests("x = 1  # " + "x" * 10 ** 6, "assert x == 1") == "passed"
