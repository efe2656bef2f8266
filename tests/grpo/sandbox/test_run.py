"""What a program can and cannot do in the sandbox: it never hangs, and never passes without its tests."""

import errno
import os
import time

import pytest

from grpo.sandbox import run as sandbox
from grpo.sandbox.run import chosen_parts, describe_sandbox, machine_parts, run_tests, take_over
from tests.attack_programs import LIMITS, programs

PROGRAMS = programs(r"""
## json
import json
assert json.loads(json.dumps({'a': [1, 2.5, None]})) == {'a': [1, 2.5, None]}
## re
import re
assert re.findall(r'\d+', 'a1b22') == ['1', '22']
## numbers
import cmath, decimal, fractions, math, statistics
assert fractions.Fraction(1, 3) * 3 == 1
assert decimal.Decimal('0.1') * 3 == decimal.Decimal('0.3')
## collections
from collections import *
assert Counter('aab')['a'] == 2
assert namedtuple('P', 'x')(1).x == 1
## algorithms
import bisect, copy, enum, functools, heapq, itertools, operator, string
@functools.lru_cache
def f(n):
    return n if n < 2 else f(n - 1) + f(n - 2)
assert f(50) == 12586269025
## dataclasses
from __future__ import annotations
from dataclasses import dataclass, field
from typing import *
@dataclass(frozen=True, order=True)
class A:
    x: int = 1
    y: List = field(default_factory=list)
assert A(1) == A() and get_type_hints(A)['x'] is int
class T(NamedTuple):
    a: int
## asyncio
import asyncio
async def f():
    await asyncio.sleep(0.01)
    return 1
async def g():
    return await asyncio.wait_for(asyncio.gather(f(), f()), 9)
assert asyncio.run(g()) == [1, 1]
## random
import hashlib, random, secrets, uuid
random.seed(1)
random.SystemRandom().random()
uuid.uuid4()
## time
import calendar, datetime, time, zoneinfo
datetime.datetime.now().isoformat()
time.localtime()
## sqlite3
import sqlite3
for name in (':memory:', 'a.db'):
    c = sqlite3.connect(name)
    c.execute('create table t(x)')
    c.executemany('insert into t values(?)', [(1,), (2,)])
    c.commit()
    assert c.execute('select sum(x) from t').fetchone() == (3,)
## tempfile
import os, tempfile
with tempfile.TemporaryDirectory() as d:
    open(os.path.join(d, 'x'), 'w')
with tempfile.NamedTemporaryFile('w+') as f:
    f.write('x')
with tempfile.TemporaryFile() as f:
    f.write(b'x')
## files
import glob, os, pathlib, shutil
p = pathlib.Path('a')
p.write_text('x')
p.touch()
shutil.copyfile('a', 'b')
shutil.move('b', 'c')
assert sorted(glob.glob('*')) == ['a', 'c']
os.makedirs('x/y')
p.rename('x/y/a')
shutil.rmtree('x')
## text
import csv, contextlib, difflib, html, io, textwrap, unicodedata, urllib.parse
import xml.etree.ElementTree as E
E.fromstring('<a/>')
b = io.StringIO()
with contextlib.redirect_stdout(b):
    print('x')
assert b.getvalue() == 'x\n'
## bytes
import base64, binascii, bz2, gzip, lzma, pickle, struct, zlib
x = b'x' * 99
assert lzma.decompress(lzma.compress(x)) == zlib.decompress(zlib.compress(x)) == x
class A:
    pass
pickle.loads(pickle.dumps(A()))
## errors
import inspect, logging, traceback, warnings
try:
    1 / 0
except ZeroDivisionError:
    assert 'Zero' in traceback.format_exc()
logging.warning('x')
warnings.warn('x')
## unittest
import unittest
class T(unittest.TestCase):
    def test(self):
        self.assertEqual(1, 1)
cases = unittest.defaultTestLoader.loadTestsFromTestCase(T)
assert unittest.TextTestRunner().run(cases).wasSuccessful()
## interpreter
import abc, ast, concurrent.futures, contextvars, gc, locale, mmap, platform, queue, sys
import threading
sys.setrecursionlimit(10000)
def f(n):
    return 0 if n == 0 else 1 + f(n - 1)
assert f(5000) == 5000
with threading.Lock():
    exec('x = 1')
locale.setlocale(locale.LC_ALL, '')
mmap.mmap(-1, 4096)[0] = 1
assert ast.literal_eval('[1]') == [1]
## signals
import signal, time
heard = []
signal.signal(signal.SIGALRM, lambda *a: heard.append(a))
signal.setitimer(signal.ITIMER_REAL, 0.01)
while not heard:
    time.sleep(0.01)
## sockets
import selectors, socket
a, b = socket.socketpair()
a.send(b'x')
assert b.recv(1) == b'x'
""")


@pytest.mark.parametrize(("code", "tests", "verdict"), [
    ("def f():\n    return 1", "assert f() == 1", "passed"),
    ("x = 'ü'\nprint(x, flush=True)", "assert x == '\\xfc'\nprint('passed')", "passed"),
    ("import asyncio\nasync def f():\n    return 1", "assert asyncio.run(f()) == 1", "passed"),
    ("open('a.txt', 'w').write('a')", "assert open('a.txt').read() == 'a'", "passed"),
    ("if __name__ == '__main__':\n    raise SystemExit", "pass", "passed"),
    ("def f():\n    return 1", "assert f() == 2", "failed"),
    ("def f(:", "pass", "failed"),
    ("x = '\0'", "pass", "failed"),
    ("", "f()", "failed"),
    ("input()", "pass", "failed"),
    ("import numpy", "pass", "failed"),
    ("def f(): f()", "f()", "failed"),
    ("print('passed'); print('ready')", "assert False", "failed"),
    ("raise SystemExit(0)", "pass", "failed"),
    ("def f():\n    raise SystemExit(0)", "f()\nassert False", "failed"),
    ("import os\nos._exit(0)", "assert False", "failed"),
    ("import atexit, os\natexit.register(os._exit, 0)", "assert False", "failed"),
    ("x = bytearray(10 ** 10)", "pass", "failed"),
    ("with open('big', 'wb') as f:\n    f.write(bytes(2 ** 21))", "pass", "failed"),
    ("import os\nos.abort()", "pass", "killed"),
    ("def f(x):\n    return x", "def f(x):\n    return 1\nassert f(2) == 1", "passed"),
    ("import builtins\nbuiltins.sorted = lambda x: [1]", "assert sorted([3, 2]) == [2, 3]", "passed"),
])
def test_the_sandbox_passes_only_what_ran_to_its_end(code, tests, verdict):
    assert run_tests(code, tests) == verdict


@pytest.mark.parametrize(("code", "verdict"), [
    ("print(int(input()) * 2)", "passed"), ("import sys\nprint(2 * int(sys.stdin.read()), '  \\n')", "passed"),
    ("if __name__ == '__main__':\n    print(2 * int(open(0).read()))", "passed"),
    ("import sys\nx = int(input())\nsys.stdout.write(str(x * 2))\nsys.exit()", "passed"),
    ("print(8)", "failed"), ("print(int(input()) * 2, 1)", "failed"), ("print(2 * int(input()))\n1 / 0", "failed"),
    ("import sys\nprint(2 * int(input()))\nsys.exit(1)", "failed"), ("print(2 * int(input())", "failed"),
    ("import os\nprint(2 * int(input()), flush=True)\nos.abort()", "killed"), ("pass", "failed"),
    ("input()\nprint('x' * 3 * 10 ** 6)", "killed")])
def test_a_program_is_judged_by_what_it_prints_for_each_input(code, verdict):
    assert run_tests(code, [{"input": "4\n", "output": "8"}, {"input": "5", "output": "10\n\n"}]) == verdict


def test_input_and_output_may_be_longer_than_a_pipe_holds_and_in_any_language():
    text = "größer ☃ " * 20000
    assert run_tests("print(input()[::-1])", [{"input": text, "output": text[::-1]}]) == "passed"
    assert run_tests("pass", [{"input": text, "output": " \n"}]) == "passed"  # who does not read its input is not hurt


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_may_use_the_standard_library_and_its_folder(name):
    assert run_tests(PROGRAMS[name], "pass") == "passed"


@pytest.mark.parametrize(("code", "seconds"), [
    ("while True:\n    print('x' * 10 ** 6)", 0.4),
    ("while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass", 0.4),
    ("import os\nwhile True:\n    os.write(4, b'x' * 100)", 10 ** 5)])
def test_what_does_not_end_or_writes_too_much_is_killed(code, seconds):
    assert run_tests(code, "pass", seconds=seconds) == "killed"


def test_the_sandbox_leaves_no_folder_behind_and_a_huge_program_does_not_block_the_pipe(monkeypatch, tmp_path):
    machine_parts()
    monkeypatch.setattr(sandbox, "PLACE", [str(tmp_path)])
    assert run_tests("import os\nopen('a', 'w')\nos.chmod('a', 0)  # " + "x" * 10 ** 6, "pass") == "passed"
    assert list(tmp_path.iterdir()) == []


# folders on the disk, where there are no namespaces

@pytest.mark.slow
@pytest.mark.parametrize("name", ["many_files", "nested_names", "empty_files", "hidden_folder"])
def test_a_folder_on_the_disk_is_measured(monkeypatch, name):
    monkeypatch.setattr(sandbox, "chosen_parts", lambda setting: [])
    assert run_tests("import os\n" + LIMITS[name], "pass", seconds=60) == "killed"
    assert run_tests("open('a', 'wb').write(bytes(1 << 20))", "pass") == "passed"


# parts that the machine offers

@pytest.fixture
def child(monkeypatch, tmp_path):
    """A function that writes the child's script: it reports a refusal of the kernel, or runs other lines. The machine
    has not been tried."""
    def write(report, lines="sys.exit(1)"):
        path.write_text(f"import os, sys, time\nos.write(1, {report.encode()!r})\n{lines}")

    path = tmp_path / "child.py"
    monkeypatch.setattr(sandbox, "CHILD", str(path))
    monkeypatch.setattr(sandbox.sys, "platform", "linux")
    monkeypatch.setattr(sandbox, "FOUND", {})
    return write


def test_a_grandchild_does_not_survive(child, monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "FOUND", {"seccomp": ""})
    child("", "if os.fork():\n    os._exit(0)\n"  # the grandchild keeps the pipe open, until it has written too much
              f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpgid(0)))\nwhile True:\n    os.write(1, bytes(9999))")
    assert run_tests("", "", seconds=600) == "killed"
    group = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(600):  # init collects an orphan after a while
            os.killpg(group, 0)
            time.sleep(0.1)


def test_the_line_of_the_start_names_the_missing_parts(monkeypatch):
    parts = machine_parts()
    assert list(parts) == ["namespaces", "Landlock", "seccomp"]
    assert chosen_parts("auto") == [part for part in parts if not parts[part]]
    monkeypatch.setattr(sandbox, "FOUND", {**parts, "namespaces": "unshare: Operation not permitted"})
    line = describe_sandbox("auto", 5.0, 256)
    assert "limits, for at most 5 s in 256 MB; missing: namespaces (unshare: Operation not permitted)" in line
    with pytest.raises(ValueError, match=r"^sandbox='strict' needs .* offer: namespaces \(unshare: Operation not"):
        describe_sandbox("strict", 5.0, 256)


@pytest.mark.parametrize(("report", "lines", "reason"), [
    ("1 unshare: Operation not permitted", "sys.exit(1)", "unshare: Operation not permitted"),
    (f"{errno.ENOSPC} unshare: no room", "sys.exit(1)", "unshare: no room"),
    ("", "os.abort()", "a trial was killed")])
def test_a_part_that_the_kernel_refuses_is_missing_with_its_reason(child, report, lines, reason):
    child(report, lines)
    assert machine_parts()["namespaces"] == reason


def test_a_trial_that_is_killed_on_a_busy_machine_is_tried_again(monkeypatch):
    verdicts = iter(["killed", "passed", "passed", "killed", "killed"])
    monkeypatch.setattr(sandbox.sys, "platform", "linux")
    monkeypatch.setattr(sandbox, "FOUND", {})
    monkeypatch.setattr(sandbox, "run_once", lambda *given: next(verdicts))
    assert list(machine_parts().values()) == ["", "", "a trial was killed"]


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_machine_that_is_full_is_never_one_with_fewer_parts(child, number):
    child(f"{number} unshare: no room")
    assert run_tests("x = 1", "pass") == "skipped"
    with pytest.raises(ValueError, match="^an empty program was skipped .* free memory, processes and the disk of TMPDIR"):
        describe_sandbox("auto", 5.0, 256)
    with pytest.raises(OSError, match="no room"):
        machine_parts()
    assert not sandbox.FOUND


def test_a_worker_runs_under_the_parts_and_in_the_folder_of_the_main_process(monkeypatch, tmp_path):
    folders = []
    monkeypatch.setattr(sandbox, "FOUND", {})
    monkeypatch.setattr(sandbox, "PLACE", folders)
    monkeypatch.setattr(sandbox.tempfile, "tempdir", "/a/folder/that/is/not/asked/for")
    take_over({"namespaces": "not here", "Landlock": "nor there", "seccomp": "x"}, str(tmp_path))
    assert chosen_parts("auto") == []
    seen = "import os\nfolder = os.path.dirname(os.getcwd())"
    assert run_tests(seen, f"assert folder == {str(tmp_path)!r}, folder") == "passed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
@pytest.mark.parametrize("refused", ["mount", "mkdtemp", "Popen"])
def test_a_machine_that_is_full_skips_the_completion_and_another_error_ends_the_run(child, monkeypatch, refused, number):
    def refuse(*arguments, **settings):
        raise OSError(number, "no")

    monkeypatch.setattr(sandbox, "FOUND", {"seccomp": ""})
    child(f"{number} mount: no")
    if refused != "mount":
        monkeypatch.setattr(sandbox.subprocess if refused == "Popen" else sandbox.tempfile, refused, refuse)
    if number == errno.EAGAIN:
        assert run_tests("x = 1", "pass") == "skipped"
    else:
        with pytest.raises(ValueError, match="no"):
            run_tests("x = 1", "pass")
