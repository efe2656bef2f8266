"""What the child process refuses to the code that it runs, and what it shows of the machine."""

import ast
import collections
import http
import os
import re
import resource

import pytest

from grpo.sandbox import child
from grpo.sandbox.run import run_tests


@pytest.mark.parametrize("attempt", [
    "os.fork()", "os.forkpty()", "os.system('true')", "os.popen('true')", "os.execv('/bin/true', ['true'])",
    "os.posix_spawn('/bin/true', ['true'], {})", "os.spawnv(os.P_WAIT, '/bin/true', ['true'])",
    "subprocess.run(['true'])", "pty.spawn('true')", "multiprocessing.Process(target=print).start()",
    "multiprocessing.get_context('spawn').Process(target=print).start()", "ctypes.CDLL(None).fork()",
    "os.kill(os.getppid(), 0)", "os.killpg(0, 9)", "socket.create_connection(('127.0.0.1', 9))",
    "socket.socket().bind(('127.0.0.1', 0))", "sys.settrace(print)", "gc.get_objects()",
    "sqlite3.connect('/tmp/x.db')", "os.open('/', os.O_RDONLY)", "[os.mkdir(str(i)) for i in range(101)]"])
def test_the_sandbox_refuses_processes_signals_network_and_foreign_code(attempt):
    modules = set(re.findall(r"\b(os|subprocess|pty|multiprocessing|ctypes|socket|sys|gc|sqlite3)\.", attempt))
    code = (f"try:\n    import {', '.join(modules)}\n    {attempt}\n"
            "except OSError as error:\n    message = str(error)")
    by_guard_or_kernel = "assert 'the sandbox refuses' in message or 'not implemented' in message or 'not permitted' in message"
    assert run_tests(code, by_guard_or_kernel) == "passed"


def test_the_sandbox_cannot_change_files_elsewhere(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    for attempt in (f"open({str(kept)!r}, 'w')", f"open({str(kept)!r}, 'ab')", f"os.remove({str(kept)!r})",
                    f"os.rename({str(kept)!r}, 'mine')", f"shutil.rmtree({str(tmp_path)!r})",
                    f"open({str(tmp_path / 'new')!r}, 'x')", f"os.chmod({str(kept)!r}, 0)",
                    f"os.symlink({str(kept)!r}, 'link')", f"os.open({os.fsencode(kept)!r}, os.O_RDWR)"):
        assert run_tests(f"import os, shutil\n{attempt}", "pass") == "failed", attempt
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert kept.read_text() == "kept"


def test_the_sandbox_sees_no_environment_and_a_folder_of_its_own(monkeypatch):
    monkeypatch.setenv("API_SECRET", "secret")
    code = ("import os, sys\nenvironment, folder, path, files = dict(os.environ), os.getcwd(), sys.path, os.listdir()\n"
            "proc = '/proc/self/environ'")
    tests = (f"assert environment == {{}}\nassert folder != {os.getcwd()!r}\nassert {os.getcwd()!r} not in path\n"
             "assert files == [], files\nassert not any('site-packages' in p for p in path)\n"
             "try:\n    text = open(proc).read()\nexcept OSError:\n    text = ''\nassert 'secret' not in text")
    assert run_tests(code, tests) == "passed"


def test_code_sees_no_arguments_of_ours():
    code = "import sys\narguments = [*sys.argv, *sys.orig_argv]"
    assert run_tests(code, "assert arguments == ['solution.py'] * 2, arguments") == "passed"
    program = "import sys\nassert len(sys.argv) == 1\nprint(sys.argv[0])"
    assert run_tests(program, [{"input": "", "output": "solution.py"}]) == "passed"


def test_a_value_travels_as_a_literal_and_a_subclass_as_what_it_holds():
    values = [None, True, 7, -10 ** 99, 0.1, -0.0, 1e300, float("inf"), 1 - 2j, "\n'\"\u2028\ud800ü", b"\xff'", [], (), (1,),
              set(), {}, {"a": [(1, 2.5), {3}], None: {4: ()}}, {(1, 2), "x"}]
    for value in values:
        found = ast.literal_eval(child.literal(value))
        assert found == value and type(found) is type(value) and "\n" not in child.literal(value)
    point = collections.namedtuple("Point", "x y")(1, 2)
    for value, plain in ((collections.Counter("aab"), {"a": 2, "b": 1}), (point, (1, 2)), (frozenset([1]), {1}),
                         ({1: 2}.keys(), {1}), (http.HTTPStatus.OK, 200), (collections.OrderedDict(a=1), {"a": 1})):
        assert ast.literal_eval(child.literal(value)) == plain
    for value in (object(), float("nan"), range(3), print, iter([])):
        assert ast.literal_eval(child.literal(value)) is ...


def test_a_limit_that_is_already_lower_stays(monkeypatch):
    hard, new, alarms = {"RLIMIT_FSIZE": 100, "RLIMIT_NOFILE": resource.RLIM_INFINITY, "RLIMIT_CPU": 7}, {}, []
    names = {getattr(resource, name): name for name in hard}
    monkeypatch.setattr(child.resource, "getrlimit", lambda kind: (0, hard[names[kind]]))
    monkeypatch.setattr(child.resource, "setrlimit", lambda kind, pair: new.update({names[kind]: pair}))
    monkeypatch.setattr(child.signal, "alarm", alarms.append)
    child.limit({"RLIMIT_CPU": 3, "RLIMIT_FSIZE": 1000, "RLIMIT_NOFILE": 32})
    assert new == {"RLIMIT_CPU": (3, 3), "RLIMIT_FSIZE": (100, 100), "RLIMIT_NOFILE": (32, 32)} and alarms == [3]
