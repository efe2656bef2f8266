"""What the child process refuses to the code that it runs, and what it shows of the machine."""

import ast
import collections
import http
import os
import re

import pytest

from grpo.sandbox import child
from grpo.sandbox.run import run_tests


@pytest.mark.parametrize("attempt", [
    "os.fork()", "os.system('true')", "os.execv('/bin/true', ['true'])", "subprocess.run(['true'])",
    "multiprocessing.get_context('spawn').Process(target=print).start()", "ctypes.CDLL(None).fork()",
    "os.kill(os.getppid(), 0)", "socket.create_connection(('127.0.0.1', 9))", "socket.socket().bind(('127.0.0.1', 0))",
    "sys.settrace(print)", "gc.get_objects()", "sqlite3.connect('/tmp/x.db')", "os.open('/', os.O_RDONLY)",
    "open('/tmp/x', 'a')", "os.rename('/tmp', 'mine')"])
def test_the_sandbox_refuses_processes_signals_network_other_files_and_foreign_code(attempt):
    modules = {"os", *re.findall(r"\b(subprocess|multiprocessing|ctypes|socket|sys|gc|sqlite3)\.", attempt)}
    code = (f"try:\n    import {', '.join(modules)}\n    {attempt}\n"
            "except OSError as error:\n    message = str(error)")
    by_guard_or_kernel = "assert 'the sandbox refuses' in message or 'not implemented' in message or 'not permitted' in message"
    assert run_tests(code, by_guard_or_kernel) == "passed"


def test_code_sees_no_environment_no_arguments_of_ours_and_a_folder_of_its_own(monkeypatch):
    monkeypatch.setenv("API_SECRET", "secret")
    code = ("import os, sys\nenvironment, folder, path, files = dict(os.environ), os.getcwd(), sys.path, os.listdir()\n"
            "arguments = [*sys.argv, *sys.orig_argv]\ntry:\n    text = open('/proc/self/environ').read()\n"
            "except OSError:\n    text = ''")
    tests = (f"assert environment == {{}}\nassert folder != {os.getcwd()!r}\nassert {os.getcwd()!r} not in path\n"
             "assert files == [], files\nassert not any('site-packages' in p for p in path)\n"
             "assert 'secret' not in text\nassert arguments == ['solution.py'] * 2, arguments")
    assert run_tests(code, tests) == "passed"
    program = "import sys\nassert len(sys.argv) == 1\nprint(sys.argv[0])"
    assert run_tests(program, [{"input": "", "output": "solution.py"}]) == "passed"


def test_a_value_travels_as_a_literal_and_a_subclass_as_what_it_holds():
    values = [None, True, -10 ** 99, -0.0, 1e300, float("inf"), 1 - 2j, "\n'\"\u2028\ud800ü", b"\xff'", [], (1,), set(), {},
              {"a": [(1, 2.5), {3}], None: {4: ()}}]
    for value in values:
        found = ast.literal_eval(child.literal(value))
        assert found == value and type(found) is type(value) and "\n" not in child.literal(value)
    point = collections.namedtuple("Point", "x y")(1, 2)
    for value, plain in ((collections.Counter("aab"), {"a": 2, "b": 1}), (point, (1, 2)), (frozenset([1]), {1}),
                         ({1: 2}.keys(), {1}), (http.HTTPStatus.OK, 200)):
        assert ast.literal_eval(child.literal(value)) == plain
    for value in (object(), float("nan"), range(3), print, iter([])):
        assert ast.literal_eval(child.literal(value)) is ...
