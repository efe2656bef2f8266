"""Wrong solutions that try to pass tests in Python: f(x) should be x * x, and is not."""

from tests.rooms.attack_programs import programs

SQUARES = "import math\nassert f(2) == 4\nassert math.isclose(f(3), 9)\nassert f(5) == 25"
EQUAL = "assert f(2) == 4\nassert f(3) == 9"
CLOSE = "import math\nassert math.isclose(f(2), 4)\nassert math.isclose(f(3), 9)"
ALL = "assert all([f(2) == 4, f(3) == 9])"
TABLE = "cases = [(2, 4), (3, 9)]\nfor x, y in cases:\n    assert f(x) == y"
UNITTEST = "import unittest\nunittest.TestCase().assertEqual(f(2), 4)"
RANDOM = "import random\nx = random.randint(2, 1000)\nassert f(x) == x * x"

WRONG = """def f(x):
    return 0
"""
HELD = """import sys
def held(name):
    frame = sys._getframe()
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]
"""  # a name of the runner, by walking the frames
# Without walking frames: 3 is the pipe from the trainer's process, 4 the one to it
PIPE = r"""import os, select
def forge(*given):
    token = b''
    if select.select([3], [], [], 0.2)[0]:
        token = os.read(3, 9999)[8:40]
    os.write(4, token + b'None\n')
    os._exit(0)
"""
# The same for code that runs before the tests are in the pipe: it waits for them, and goes on if they do not come
WAIT = r"""import os, select
def wait(seconds=5):
    if select.select([3], [], [], seconds)[0]:
        os.write(4, os.read(3, 9999)[8:40] + b'None\n')
        os._exit(0)
"""
FORGERIES = programs(r"""
## equal object
class Same(float):
    def __eq__(self, other):
        return True
def f(x):
    return Same()
## builtin's name
all = bool = abs = lambda *given: True
<WRONG>
## frames in f
<HELD>
import os
def f(x):
    held('write')(held('report'), held('token') + b'None\n')
    os._exit(0)
## frames in the code
<HELD>
receive, write, report, token, how = map(held, ('receive', 'write', 'report', 'token', 'how'))
write(report, token + b'None\n')
while request := receive():
    how = request[1]
    write(report, token + (b'None' if how == 'exec' else b'4') + b'\n')
import os
os._exit(0)
## exit handler
<PIPE>
import atexit
atexit.register(forge)
<WRONG>
## code of the runner
import sys
m = sys.modules['__main__']
for name in ('receiver', 'runner', 'literal', 'new_module', 'main'):
    try:
        getattr(m, name).__code__ = (lambda *given: '4').__code__
    except ValueError:
        pass
<WRONG>
## defaults of the runner
import sys
m = sys.modules['__main__']
m.receiver.__defaults__ = (lambda *a: b'',)
m.runner.__defaults__ = (lambda *a, **k: (lambda: 0).__code__, lambda *a: lambda: 4)
<WRONG>
## pipe in f
<PIPE>
f = forge
## pipe in ==
<PIPE>
class Same(float):
    __eq__ = forge
def f(x):
    return Same()
## pipe in del
<PIPE>
class Last:
    __del__ = forge
def f(x):
    Last()
    return 0
## pipe in gc
<PIPE>
import gc
def f(x):
    gc.callbacks.append(forge)
    gc.collect()
## pipe in a signal
<PIPE>
import signal, time
signal.signal(signal.SIGALRM, forge)
def f(x):
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(1)
## pipe in excepthook
<PIPE>
import sys
sys.excepthook = forge
<WRONG>
## gc before the tests
<WAIT>
<WRONG>
import gc
gc.callbacks.append(lambda *given: wait(1))
gc.set_threshold(1)
## del before the tests
<WAIT>
<WRONG>
import sys
class Last:
    def __del__(self):
        wait()
sys.modules['tests'] = Last()
## module before the tests
<WAIT>
<WRONG>
import types
types.ModuleType = lambda name: wait()
## signal before the tests
<WAIT>
<WRONG>
import signal
def again(*given):
    wait(0.05)
    signal.setitimer(signal.ITIMER_REAL, 1e-5)
signal.signal(signal.SIGALRM, again)
again()
## bytecode
import dis, sys
def f(x):
    frame = sys._getframe(1)
    return next((i.argval for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti
                 and i.opname == 'LOAD_CONST'), 0)
## constants
import sys
def f(x):
    found = sys._getframe(1).f_code.co_consts
    return found[found.index(x) + 1] if x in found[:-1] else 0
## source
import re, sys
seen = ['']
def hook(event, given):
    if event == 'compile' and given[0]:
        seen[0] = given[0].decode()
sys.addaudithook(hook)
def f(x):
    found = re.search(rf'f\({x}\)(?:,| ==) (\d+)', seen[0])
    return int(found[1]) if found else 0
## names of the tests
import sys
def f(x):
    return dict(sys._getframe(1).f_globals.get('cases', ())).get(x)
## emptied list
import sys
def f(x):
    cases = sys._getframe(1).f_globals.get('cases', [(2, 4)])
    y = dict(cases).get(x)
    cases.clear()
    return y
## isclose
import math
math.isclose = lambda *given: True
<WRONG>
## assertEqual
import unittest
unittest.TestCase.assertEqual = lambda *given: None
<WRONG>
## randint
import random
random.randint = lambda *given: 0
<WRONG>
## false module
import sys, types
sys.modules['math'] = types.SimpleNamespace(isclose=lambda *given: True)
<WRONG>
## import hook
import importlib.machinery, sys, types
class Finder:
    def find_spec(self, name, *given):
        return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        module.isclose = lambda *given: True
sys.meta_path.insert(0, Finder())
sys.modules.pop('math', None)
<WRONG>
## exit in f
import os
def f(x):
    os._exit(0)
## SystemExit in f
def f(x):
    raise SystemExit(0)
## printed markers
import os
for n in range(3, 30):
    try:
        os.write(n, b'None\n')
    except OSError:
        pass
<WRONG>
## AssertionError
import builtins
builtins.AssertionError = KeyError
class E(AssertionError):
    pass
<WRONG>
## module of the tests
import sys, types
sys.modules['tests'] = types.ModuleType('tests')
def f(x):
    sys.modules['tests'] = None
    return 0
## f_trace
import sys
def f(x):
    sys._getframe(1).f_trace = lambda frame, *given: None
    return 0
## f_lineno
import sys
def f(x):
    try:
        sys._getframe(1).f_lineno = 99
    except ValueError:
        pass
    return 0
## frame.clear
import sys
def f(x):
    try:
        sys._getframe(1).clear()
    except RuntimeError:
        pass
    return 0
## settrace
import sys
try:
    sys.settrace(lambda *given: None)
except PermissionError:
    pass
<WRONG>
## false builtins
__builtins__ = {'AssertionError': None}
<WRONG>
## recursion limit
import sys
def f(x):
    sys.setrecursionlimit(50)
    return f(x)
## endless f
def f(x):
    while True:
        pass
## coding cookie
# -*- coding: utf-7 -*-
<WRONG>
## closed pipe
import os
os.closerange(3, 100)
<WRONG>
## other results
import itertools
results = itertools.count(4)
def f(x):
    return next(results)
""", WRONG=WRONG, HELD=HELD, PIPE=PIPE, WAIT=WAIT)
# The tests that a forgery was written for, where they are not SQUARES
OTHER_TESTS = {"equal object": EQUAL, "builtin's name": ALL, "names of the tests": TABLE, "emptied list": TABLE,
               "isclose": CLOSE, "false module": CLOSE, "import hook": CLOSE, "assertEqual": UNITTEST,
               "randint": RANDOM}
# Those that pass tests which run whole, with the code (docs/rewards.md)
PASS_WHOLE = {"equal object", "builtin's name", "frames in f", "frames in the code", "gc before the tests",
              "del before the tests", "module before the tests", "signal before the tests", "bytecode", "constants",
              "source", "names of the tests", "emptied list", "isclose", "false module", "import hook", "assertEqual",
              "randint"}
ENDED = ("endless f", "closed pipe")  # the deadline ends them, or they are ended when they close the pipe
