"""Wrong solutions that try to pass tests in Python: f(x) should be x * x, and is not.

python tests/forgeries.py          judges each by tests that are cut into calls, and by tests that run with the code as a
                                   whole; prints a table, and exits with 1 if one passes that should not

tests/grpo/sandbox/test_run_attacks.py judges all of them by calls, and some by tests as a whole.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from grpo.reward_functions.asserts import cut
from grpo.sandbox.run import run_tests

SQUARES = "import math\nassert f(2) == 4\nassert math.isclose(f(3), 9)\nassert f(5) == 25"
EQUAL = "assert f(2) == 4\nassert f(3) == 9"
CLOSE = "import math\nassert math.isclose(f(2), 4)\nassert math.isclose(f(3), 9)"
ALL = "assert all([f(2) == 4, f(3) == 9])"
TABLE = "cases = [(2, 4), (3, 9)]\nfor x, y in cases:\n    assert f(x) == y"
UNITTEST = "import unittest\nunittest.TestCase().assertEqual(f(2), 4)"
RANDOM = "import random\nx = random.randint(2, 1000)\nassert f(x) == x * x"

WRONG = "def f(x):\n    return 0\n"
HELD = ("import sys\ndef held(name):\n    frame = sys._getframe()\n    while name not in frame.f_locals:\n"
        "        frame = frame.f_back\n    return frame.f_locals[name]\n")  # a name of the runner, by walking the frames
ANSWER = "b'None' if how == 'exec' else b'4'"
# What can be done without walking frames: 3 is the pipe from the trainer's process, 4 the one to it
PIPE = ("import os, select\ndef forge(*given):\n    token = b''\n    if select.select([3], [], [], 0.2)[0]:\n"
        "        token = os.read(3, 9999)[8:40]\n    os.write(4, token + b'None\\n')\n    os._exit(0)\n")
# The same for what runs before the tests are in the pipe: it waits for them, and goes on if they do not come
WAIT = ("import os, select\ndef wait(seconds=5):\n    if select.select([3], [], [], seconds)[0]:\n"
        "        os.write(4, os.read(3, 9999)[8:40] + b'None\\n')\n        os._exit(0)\n")
FORGERIES = {
    # Ways that were known first
    "equal object": "class Same(float):\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return Same()",
    "builtin's name": "all = bool = abs = lambda *given: True\n" + WRONG,
    "frames in f": HELD + "import os\ndef f(x):\n    held('write')(held('report'), held('token') + b'None\\n')\n"
                          "    os._exit(0)",
    "frames in the code": HELD + "receive, write, report, token, how = map(held, ('receive', 'write', 'report', 'token', "
                                 "'how'))\nwrite(report, token + b'None\\n')\nwhile request := receive():\n"
                                 f"    how = request[1]\n    write(report, token + ({ANSWER}) + b'\\n')\n"
                                 "import os\nos._exit(0)",
    # What is left of the process, and the runner's functions
    "exit handler": PIPE + "import atexit\natexit.register(forge)\n" + WRONG,
    "code of the runner": "import sys\nm = sys.modules['__main__']\n"
                          "for name in ('receiver', 'runner', 'literal', 'new_module', 'main'):\n"
                          "    try:\n        getattr(m, name).__code__ = (lambda *given: '4').__code__\n"
                          "    except ValueError:\n        pass\n" + WRONG,
    "defaults of the runner": "import sys\nm = sys.modules['__main__']\nm.receiver.__defaults__ = (lambda *a: b'',)\n"
                              "m.runner.__defaults__ = (lambda *a, **k: (lambda: 0).__code__, lambda *a: lambda: 4)\n"
                              + WRONG,
    # The pipe by its number
    "pipe in f": PIPE + "f = forge",
    "pipe in ==": PIPE + "class Same(float):\n    __eq__ = forge\ndef f(x):\n    return Same()",
    "pipe in del": PIPE + "class Last:\n    __del__ = forge\ndef f(x):\n    Last()\n    return 0",
    "pipe in gc": PIPE + "import gc\ndef f(x):\n    gc.callbacks.append(forge)\n    gc.collect()",
    "pipe in a signal": PIPE + "import signal, time\nsignal.signal(signal.SIGALRM, forge)\n"
                               "def f(x):\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    time.sleep(1)",
    "pipe in excepthook": PIPE + "import sys\nsys.excepthook = forge\n" + WRONG,
    # The same when the code has run, and before the runner has read the tests
    "gc before the tests": WAIT + WRONG + "import gc\ngc.callbacks.append(lambda *given: wait(1))\n"
                                          "gc.set_threshold(1)\n",
    "del before the tests": WAIT + WRONG + "import sys\nclass Last:\n    def __del__(self):\n        wait()\n"
                                           "sys.modules['tests'] = Last()\n",
    "module before the tests": WAIT + WRONG + "import types\ntypes.ModuleType = lambda name: wait()\n",
    "signal before the tests": WAIT + WRONG + "import signal\ndef again(*given):\n    wait(0.05)\n"
                                              "    signal.setitimer(signal.ITIMER_REAL, 1e-5)\n"
                                              "signal.signal(signal.SIGALRM, again)\nagain()\n",
    # What is expected, where it is read
    "bytecode": "import dis, sys\ndef f(x):\n    frame = sys._getframe(1)\n"
                "    return next((i.argval for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti\n"
                "                 and i.opname == 'LOAD_CONST'), 0)",
    "constants": "import sys\ndef f(x):\n    found = sys._getframe(1).f_code.co_consts\n"
                 "    return found[found.index(x) + 1] if x in found[:-1] else 0",
    "source": "import re, sys\nseen = ['']\ndef hook(event, given):\n    if event == 'compile' and given[0]:\n"
              "        seen[0] = given[0].decode()\nsys.addaudithook(hook)\ndef f(x):\n"
              "    found = re.search(rf'f\\({x}\\)(?:,| ==) (\\d+)', seen[0])\n    return int(found[1]) if found else 0",
    "names of the tests": "import sys\ndef f(x):\n    return dict(sys._getframe(1).f_globals.get('cases', ())).get(x)",
    "emptied list": "import sys\ndef f(x):\n    cases = sys._getframe(1).f_globals.get('cases', [(2, 4)])\n"
                    "    y = dict(cases).get(x)\n    cases.clear()\n    return y",
    # What the tests import
    "isclose": "import math\nmath.isclose = lambda *given: True\n" + WRONG,
    "assertEqual": "import unittest\nunittest.TestCase.assertEqual = lambda *given: None\n" + WRONG,
    "randint": "import random\nrandom.randint = lambda *given: 0\n" + WRONG,
    "false module": "import sys, types\nsys.modules['math'] = types.SimpleNamespace(isclose=lambda *given: True)\n"
                    + WRONG,
    "import hook": "import importlib.machinery, sys, types\nclass Finder:\n    def find_spec(self, name, *given):\n"
                   "        return importlib.machinery.ModuleSpec(name, self)\n"
                   "    def create_module(self, spec):\n        return None\n    def exec_module(self, module):\n"
                   "        module.isclose = lambda *given: True\nsys.meta_path.insert(0, Finder())\n"
                   "sys.modules.pop('math', None)\n" + WRONG,
    # Ways that never worked
    "exit in f": "import os\ndef f(x):\n    os._exit(0)",
    "SystemExit in f": "def f(x):\n    raise SystemExit(0)",
    "printed markers": "import os\nfor n in range(3, 30):\n    try:\n        os.write(n, b'None\\n')\n"
                       "    except OSError:\n        pass\n" + WRONG,
    "AssertionError": "import builtins\nbuiltins.AssertionError = KeyError\nclass E(AssertionError):\n    pass\n" + WRONG,
    "module of the tests": "import sys, types\nsys.modules['tests'] = types.ModuleType('tests')\n"
                           "def f(x):\n    sys.modules['tests'] = None\n    return 0",
    "f_trace": "import sys\ndef f(x):\n    sys._getframe(1).f_trace = lambda frame, *given: None\n    return 0",
    "f_lineno": "import sys\ndef f(x):\n    try:\n        sys._getframe(1).f_lineno = 99\n    except ValueError:\n"
                "        pass\n    return 0",
    "frame.clear": "import sys\ndef f(x):\n    try:\n        sys._getframe(1).clear()\n    except RuntimeError:\n"
                   "        pass\n    return 0",
    "settrace": "import sys\ntry:\n    sys.settrace(lambda *given: None)\nexcept PermissionError:\n    pass\n" + WRONG,
    "false builtins": "__builtins__ = {'AssertionError': None}\n" + WRONG,
    "recursion limit": "import sys\ndef f(x):\n    sys.setrecursionlimit(50)\n    return f(x)",
    "endless f": "def f(x):\n    while True:\n        pass",
    "coding cookie": "# -*- coding: utf-7 -*-\n" + WRONG,
    "closed pipe": "import os\nos.closerange(3, 100)\n" + WRONG,
    "other results": "import itertools\nresults = itertools.count(4)\ndef f(x):\n    return next(results)",
}
# The tests that a forgery was written for, where they are not SQUARES
OTHER_TESTS = {"equal object": EQUAL, "builtin's name": ALL, "names of the tests": TABLE, "emptied list": TABLE,
               "isclose": CLOSE, "false module": CLOSE, "import hook": CLOSE, "assertEqual": UNITTEST,
               "randint": RANDOM}
# Those that pass tests which run whole, with the code (docs/security.md)
PASS_WHOLE = {"equal object", "builtin's name", "frames in f", "frames in the code", "gc before the tests",
              "del before the tests", "module before the tests", "signal before the tests", "bytecode", "constants",
              "source", "names of the tests", "emptied list", "isclose", "false module", "import hook", "assertEqual",
              "randint"}
BY_LUCK = ("signal before the tests",)  # a signal has to come at the right moment
ENDED = ("endless f", "closed pipe")    # the deadline ends them, or they are ended when they close the pipe


def passes(name, tests):
    """Whether tests count a forgery as right. Only the forgeries in ENDED meet their deadline, however slow the machine
    is; those in BY_LUCK have several attempts."""
    attempts = 20 if name in BY_LUCK else 1
    seconds = 2 if name in ENDED else 60
    return any(run_tests(FORGERIES[name], tests, seconds=seconds) == "passed" for _ in range(attempts))


def passes_whole(name):
    return passes(name, OTHER_TESTS.get(name, SQUARES))


def main():
    """Judges every forgery and prints the table."""
    wrong = []
    for name in FORGERIES:
        by_calls = any(passes(name, cut(tests)) for tests in (SQUARES, EQUAL, CLOSE))
        whole = passes_whole(name)
        if by_calls or whole != (name in PASS_WHOLE):
            wrong.append(name)
        print(f"{name:<26}cut into calls: {'right' if by_calls else 'wrong':<8}whole: {'right' if whole else 'wrong'}",
              flush=True)
    print(f"{len(FORGERIES)} forgeries, not judged as docs/security.md says: {', '.join(wrong) or 'none'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
