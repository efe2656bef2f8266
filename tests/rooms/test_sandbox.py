"""Code in the sandbox never hangs and never passes without its tests; a machine that is full, or lacks a part of the
protection, says so."""

import ast
import collections
import errno
import http
import os
import subprocess
import sys
import time

import pytest

from core.errors import Mistake
from grpo.reward_functions.verify_code import cut
from grpo.sandbox import child as child_script
from grpo.sandbox import run as sandbox
from grpo.sandbox.kernel import FILES, FOLDER_BYTES
from grpo.sandbox.run import chosen_parts, describe_sandbox, missing_parts, run_tests
from tests.rooms.attack_programs import programs
from tests.tiny import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the sandbox")

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


ASSERTS, LONG = "def f():\n    return 1", "größer ☃ " * 20000  # more than a pipe holds
EIGHT_AND_TEN = [{"input": "4\n", "output": "8"}, {"input": "5", "output": "10\n\n"}]
VERDICTS = [
    ("passed", "assert f() == 1", [
        ASSERTS, "def f():\n    return 1\nif __name__ == '__main__':\n    raise SystemExit"]),
    ("passed", "assert x == '\\xfc'\nprint('passed')", ["x = 'ü'\nprint(x, flush=True)"]),
    ("passed", "assert open('a.txt').read() == 'a'", ["open('a.txt', 'w').write('a')"]),
    ("passed", "def f(x):\n    return 1\nassert f(2) == 1", ["def f(x):\n    return x"]),
    ("passed", "assert sorted([3, 2]) == [2, 3]", ["import builtins\nbuiltins.sorted = lambda x: [1]"]),
    ("failed", "assert f() == 2", [ASSERTS, "", "def f(): f()", "def f():\n    raise SystemExit(0)"]),
    ("failed", "pass", ["def f(:", "x = '\0'", "input()", "import numpy", "raise SystemExit(0)",
                        "x = bytearray(10 ** 10)", "with open('big', 'wb') as f:\n    f.write(bytes(2 ** 21))"]),
    ("failed", "assert False", ["print('passed'); print('ready')", "import os\nos._exit(0)",
                                "import atexit, os\natexit.register(os._exit, 0)"]),
    ("killed", "pass", ["import os\nos.abort()"]),
    ("passed", EIGHT_AND_TEN, [
        "print(int(input()) * 2)", "import sys\nprint(2 * int(sys.stdin.read()), '  \\n')",
        "if __name__ == '__main__':\n    print(2 * int(open(0).read()))",
        "import sys\nx = int(input())\nsys.stdout.write(str(x * 2))\nsys.exit()"]),
    ("failed", EIGHT_AND_TEN, [
        "print(8)", "print(int(input()) * 2, 1)", "print(2 * int(input()))\n1 / 0", "print(2 * int(input())", "pass",
        "import sys\nprint(2 * int(input()))\nsys.exit(1)"]),
    ("killed", EIGHT_AND_TEN, ["import os\nprint(2 * int(input()), flush=True)\nos.abort()",
                               "input()\nprint('x' * 3 * 10 ** 6)"]),
    ("passed", [{"input": LONG, "output": LONG[::-1]}], ["print(input()[::-1])"]),
    ("passed", [{"input": LONG, "output": " \n"}], ["pass"])]  # who does not read its input is not hurt


@pytest.mark.parametrize(("verdict", "tests", "code"), [
    (verdict, tests, code) for verdict, tests, codes in VERDICTS for code in codes])
def test_the_sandbox_passes_only_what_ran_to_its_end(verdict, tests, code):
    assert run_tests(code, tests) == verdict


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_may_use_the_standard_library_and_its_folder(name):
    assert run_tests(PROGRAMS[name], "pass") == "passed"


@pytest.mark.parametrize(("code", "seconds"), [
    ("while True:\n    print('x' * 10 ** 6)", 0.4),
    ("while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass", 0.4),
    ("import os\nwhile True:\n    os.write(4, b'x' * 100)", 10 ** 5)])
def test_what_does_not_end_or_writes_too_much_is_killed(code, seconds):
    assert run_tests(code, "pass", seconds=seconds) == "killed"


def test_code_sees_no_environment_no_arguments_of_ours_and_a_folder_of_its_own_which_is_removed(monkeypatch, tmp_path):
    monkeypatch.setenv("API_SECRET", "secret")
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    code = ("import os, sys\nenvironment, folder, path, files = dict(os.environ), os.getcwd(), sys.path, os.listdir()\n"
            "arguments = [*sys.argv, *sys.orig_argv]\ntry:\n    text = open('/proc/self/environ').read()\n"
            "except OSError:\n    text = ''\nroot, own = os.statvfs('/'), os.statvfs('.')\nos.mkdir('a', 0)")
    tests = (f"import os\nassert environment == {{}}\nassert {os.getcwd()!r} not in [folder, *path]\n"
             "assert files == [], files\nassert not any('site-packages' in p for p in path)\n"
             "assert 'secret' not in text\nassert arguments == ['solution.py'] * 2, arguments\n")
    if "namespaces" not in missing_parts():
        tests += (f"assert own.f_blocks * own.f_frsize == {FOLDER_BYTES}\nassert own.f_files == {FILES}\n"
                  "assert root.f_flag & os.ST_RDONLY")
    assert run_tests(code, tests) == "passed"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("values", "plain"), [
    (values, values) for values in ([None, True, -10 ** 99, float("inf"), 1 - 2j, "\n'\"\u2028\ud800ü", b"\xff'"],
                                    ([], (1,), set()), {"a": [(1, 2.5), {3}], None: {4: ()}})] + [
    (collections.Counter("aab"), {"a": 2, "b": 1}), (time.gmtime(0), (1970, 1, 1, 0, 0, 0, 3, 1, 0)),
    ([frozenset([1]), {1: 2}.keys(), http.HTTPStatus.OK], [{1}, {1}, 200]),
    ([object(), float("nan"), range(3), print], [...] * 4)])
def test_a_value_travels_as_a_literal_and_a_subclass_as_what_it_holds(values, plain):
    text = child_script.literal(values)
    assert repr(ast.literal_eval(text)) == repr(plain) and "\n" not in text


# parts that the machine offers

@pytest.fixture
def child(monkeypatch, tmp_path):
    """A function that writes a child's script which reports a refusal of the kernel. The machine has not been tried."""
    def write(report):
        path.write_text(f"import os, sys\nos.write(1, {report.encode()!r})\nsys.exit(1)")

    path = tmp_path / "child.py"
    monkeypatch.setattr(sandbox, "CHILD", str(path))
    missing_parts.cache_clear()
    yield write
    missing_parts.cache_clear()


@pytest.mark.parametrize(("missing", "auto"), [
    ([], True), (["namespaces"], True), (["Landlock"], False), (["seccomp"], False),
    (["namespaces", "Landlock"], False), (["namespaces", "seccomp"], False)])
def test_code_runs_only_where_the_kernel_guards_calls_and_files(monkeypatch, tmp_path, missing, auto):
    monkeypatch.setattr(sandbox, "missing_parts", lambda: dict.fromkeys(missing, "refused"))
    (tmp_path / "records").write_text("4")
    question = cut("assert f(2) == 4")
    reads_the_answer = f"def f(x):\n    return int(open({str(tmp_path / 'records')!r}).read())"
    assert sandbox.run_once(reads_the_answer, question, 60.0, 256, ["seccomp"]) == "passed"  # nothing guards files
    for setting, accepted in (("auto", auto), ("strict", not missing)):
        if accepted:
            assert set(chosen_parts(setting)) == {"namespaces", "Landlock", "seccomp"} - set(missing)
            assert run_tests(reads_the_answer, question, sandbox=setting) == "failed"
            if "namespaces" in missing:  # only a folder in memory is writable
                assert run_tests("open('a', 'w')", "pass", sandbox=setting) == "failed"
            continue
        with pytest.raises(Mistake, match=missing[0]):
            run_tests("x = 1", "pass", sandbox=setting)


def test_code_does_not_run_on_another_system(child, monkeypatch):
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(Mistake, match="code_execution.*Linux"):
        run_tests("x = 1", "pass")


def test_a_part_that_the_kernel_refuses_is_missing_and_a_machine_that_is_full_is_never_one_with_fewer_parts(child):
    for number in (errno.EPERM, errno.ENOSPC):  # ENOSPC: no namespaces
        child(f"{number} unshare: refused")
        assert missing_parts()["namespaces"] == "unshare: refused"
        missing_parts.cache_clear()
    for number in (errno.EAGAIN, errno.ENOMEM):
        child(f"{number} unshare: no room")
        assert run_tests("x = 1", "pass") == "skipped"
        with pytest.raises(Mistake, match="TMPDIR"):
            describe_sandbox("auto", 5.0, 256)


@pytest.mark.parametrize("refused", ["mount", "TemporaryDirectory", "Popen"])
def test_a_full_machine_skips_the_completion_and_another_error_ends_the_run(child, monkeypatch, refused):
    monkeypatch.setattr(sandbox, "missing_parts", dict)
    for number in (errno.EAGAIN, errno.EACCES):
        def refuse(*arguments, error=number, **settings):
            raise OSError(error, "no")

        child(f"{number} mount: no")
        if refused != "mount":
            monkeypatch.setattr(sandbox.subprocess if refused == "Popen" else sandbox.tempfile, refused, refuse)
        if number == errno.EAGAIN:
            assert run_tests("x = 1", "pass") == "skipped"
    with pytest.raises(Mistake, match="no"):
        run_tests("x = 1", "pass")


def run_python(code, *arguments):
    """What a fresh interpreter prints that has imported grpo/sandbox/kernel.py."""
    head = f"import os, sys\nsys.path.insert(0, {os.path.join(ROOT, 'grpo', 'sandbox')!r})\nimport kernel\n"
    return subprocess.run([sys.executable, "-c", head + code, *arguments], capture_output=True, text=True).stdout


def test_root_keeps_no_capability():
    status = run_python("kernel.drop_privileges()\nprint(open('/proc/self/status').read())")
    lines = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("Cap", "NoNew")))
    assert int(lines["CapEff"], 16) == int(lines["CapPrm"], 16) == 0 and lines["NoNewPrivs"] == "1"


def test_a_child_whose_parent_has_ended_before_ends_at_once():
    code = "kernel.end_with(int(sys.argv[1]))\nprint('goes on')"
    assert run_python(code, "1" if os.getpid() != 1 else "2") == ""
    assert run_python(code.replace("int(sys.argv[1])", "os.getppid()")) == "goes on\n"
