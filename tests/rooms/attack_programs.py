"""The code of the attacks of attacks.py. Its names folder, parent, port and address are what it is after."""

HERE = """import ctypes
libc = ctypes.CDLL(None, use_errno=True)
"""
NATIVE = HERE + """def call(x86_64, aarch64, *a):
    number = x86_64 if os.uname().machine == 'x86_64' else aarch64
    a = [ctypes.c_long(x) if isinstance(x, int) else x for x in a]
    if (result := libc.syscall(number, *a)) < 0:
        raise OSError(ctypes.get_errno(), str(a))
    return result
"""


def programs(text, **parts):
    """{name: code} of programs, each of which begins with "## name". parts: {name: code that stands for <name>}"""
    for name, code in parts.items():
        text = text.replace(f"<{name}>\n", code)
    return dict(part.split("\n", 1) for part in text.strip().removeprefix("## ").split("\n## "))


# On files and processes outside. Landlock alone stops them
FILES = programs(r"""
## write
open(f'{folder}/new', 'w').write('x')
## append
open(f'{folder}/kept', 'a').write('x')
## delete
os.remove(f'{folder}/kept')
## write_by_dir_fd
d = os.open(folder, os.O_RDONLY)
os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=d)
## delete_by_dir_fd
d = os.open(folder, os.O_PATH)
os.remove('kept', dir_fd=d)
## write_after_chdir
os.chdir(folder)
open('new', 'w').write('x')
## symlink_out
os.symlink(f'{folder}/kept', 'link')
open('link', 'a').write('x')
## hard_link_in
os.link(f'{folder}/kept', 'mine')
## move_in
os.rename(f'{folder}/kept', 'mine')
## move_out
open('mine', 'w').write('x')
os.rename('mine', f'{folder}/new')
## folder
os.mkdir(f'{folder}/new')
## fifo
os.mkfifo(f'{folder}/new')
## node
os.mknod(f'{folder}/new')
## sqlite
import sqlite3
sqlite3.connect(f'{folder}/new').execute('create table t (x)')
## sqlite_attach
import sqlite3
c = sqlite3.connect(':memory:')
c.execute(f"attach '{folder}/new' as a")
c.execute('create table a.t (x)')
## shared_memory
import _posixshmem
_posixshmem.shm_open(f'/attack{parent}', os.O_CREAT | os.O_RDWR, mode=0o600)
## read_secret
assert open(f'{folder}/secret').read() == 'secret'
## read_by_link
os.symlink(f'{folder}/secret', 'link')
assert open('link').read() == 'secret'
## read_by_proc
assert open(f'/proc/self/root{folder}/secret').read() == 'secret'
## read_users
assert 'root' in open('/etc/passwd').read()
## list_folder
assert 'secret' in os.listdir(folder)
## environment
assert b'=' in open(f'/proc/{parent}/environ', 'rb').read()
## open_files
assert os.listdir(f'/proc/{parent}/fd')
## processes
assert str(parent) in os.listdir('/proc')
## memory_file
f = open(f'/proc/{parent}/mem', 'rb', 0)
f.seek(address)
assert f.read(6) == b'secret'
## program
for n in (3, 4):
    os.set_inheritable(n, True)
os.execv('/bin/sh', ['sh', '-c', f'echo x > {folder}/new'])
""")
# seccomp alone stops them
CALLS = programs(r"""
## mode
os.chmod(f'{folder}/kept', 0o777)
## times
os.utime(f'{folder}/kept', (1, 1))
## truncate
os.truncate(f'{folder}/kept', 0)
## attribute
os.setxattr(f'{folder}/kept', 'user.x', b'x')
## socket_file
import socket
socket.socket(socket.AF_UNIX).bind(f'{folder}/new')
## signal
os.kill(parent, 10)
## signal_by_pidfd
import signal
signal.pidfd_send_signal(os.pidfd_open(parent), 10)
## signal_by_file
import fcntl
r, w = os.pipe()
fcntl.fcntl(r, 8, parent)
fcntl.fcntl(r, 10, 10)
fcntl.fcntl(r, 4, 0o20000)
os.write(w, b'x')
## signal_by_queue
<NATIVE>
b = ctypes.create_string_buffer(128)
ctypes.c_int.from_buffer(b, 8).value = -1
call(129, 138, parent, 10, b)
## limits_of_parent
import resource
resource.prlimit(parent, resource.RLIMIT_CORE, (0, 0))
## priority_of_parent
os.setpriority(os.PRIO_PROCESS, parent, 19)
## scheduler_of_parent
os.sched_setscheduler(parent, os.SCHED_BATCH, os.sched_param(0))
## raised_limit
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))
## ptrace
<NATIVE>
call(101, 117, 0x4206, parent, 0, 0)
## parent_memory
<NATIVE>
b = ctypes.create_string_buffer(6)
here = (ctypes.c_size_t * 2)(ctypes.addressof(b), 6)
there = (ctypes.c_size_t * 2)(address, 6)
call(310, 270, parent, here, 1, there, 1, 0)
assert b.raw == b'secret'
## parent_files
<NATIVE>
call(438, 438, os.pidfd_open(parent), 0, 0)
## io_uring
<NATIVE>
call(425, 425, 4, ctypes.create_string_buffer(120))
## namespace
<HERE>
if libc.unshare(0x10000000):
    raise OSError('unshare')
## outlive
<HERE>
if libc.prctl(1, 0, 0, 0, 0):
    raise OSError('prctl')
## chroot
os.chroot('.')
## fork
if os.fork() == 0:
    os._exit(0)
## fork_bomb
import time
for _ in range(50):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(0)
## double_fork
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1)
        open(f'{folder}/new', 'w')
    os._exit(0)
## clone
<NATIVE>
if call(56, 220, 17, 0, 0, 0, 0) == 0:
    os._exit(0)
## subprocess
import subprocess
subprocess.run(['/bin/true'], check=True)
## posix_spawn
os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)
## thread
import threading
threading.Thread(target=print).start()
## memory_in_a_file
f = os.memfd_create('x')
for _ in range(20):
    os.write(f, bytes(1 << 20))
## tcp
import socket
socket.create_connection(('127.0.0.1', port), 2).send(b'x')
## udp
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))
## listen
import socket
socket.create_server(('127.0.0.1', 0))
## unix_socket
import socket
socket.socket(socket.AF_UNIX).connect(f'{folder}/server')
## unix_datagram
import socket
socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', f'{folder}/datagrams')
## abstract_socket
import socket
socket.socket(socket.AF_UNIX).connect(f'\0attack{parent}')
""", NATIVE=NATIVE, HERE=HERE)
# Limits stop them, of the process, the folder or time
LIMITS = programs(r"""
## memory
import mmap
mmap.mmap(-1, 10 ** 9, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
## large_file
with open('big', 'wb') as f:
    f.write(bytes(2 << 20))
## many_files
import time
for i in range(40):
    open(f'{i}', 'wb').write(bytes(1 << 20))
time.sleep(2)
## nested_names
import time
d = os.open('.', os.O_RDONLY)
for i in range(50):
    os.mkdir('x' * 250, dir_fd=d)
    d, old = os.open('x' * 250, os.O_RDONLY, dir_fd=d), d
    os.close(old)
for i in range(40):
    f = os.open(f'{i}', os.O_CREAT | os.O_WRONLY, dir_fd=d)
    os.write(f, bytes(1 << 20))
    os.close(f)
time.sleep(2)
## hidden_folder
import time
os.mkdir('x', 0o300)
for i in range(40):
    open(f'x/{i}', 'wb').write(bytes(1 << 20))
time.sleep(2)
## empty_files
import time
for i in range(3000):
    open(f'{i}', 'wb').close()
time.sleep(2)
## deep_folders
for _ in range(1500):
    os.mkdir('x')
    os.chdir('x')
## descriptors
x = [os.dup(0) for _ in range(100)]
## output
while True:
    os.write(4, b'x' * 1000)
## recursion
import sys
sys.setrecursionlimit(10 ** 9)
f = lambda x: f(x) + 1
f(0)
## time
import time
time.sleep(10 ** 6)
## ignored_signals
import signal, time
for s in (1, 2, 14, 15):
    signal.signal(s, signal.SIG_IGN)
while True:
    try:
        time.sleep(10 ** 6)
    except BaseException:
        pass
""")
# On what judges: the tests are `assert solved == 7`, or the number 7 is expected as output
JUDGES = programs(r"""
## runpy
import runpy
runpy.run_path = lambda *a, **k: {}
## compile
import builtins
builtins.compile = lambda *a, **k: (lambda: 0).__code__
## function
import types
types.FunctionType = lambda *a, **k: lambda: None
## assertion
import builtins
builtins.AssertionError = KeyError
builtins.__import__ = None
## main
import sys
m = sys.modules['__main__']
for n in ('receiver', 'runner', 'literal', 'new_module', 'limit', 'protect'):
    setattr(m, n, lambda *a, **k: {})
## modules
import sys
for m in ('os', 'builtins', 'types', 'sys'):
    sys.modules[m] = None
## exit
import os
os._exit(0)
## exit_handler
import atexit, os
atexit.register(os._exit, 0)
## system_exit
raise SystemExit(0)
## os_exit_replaced
import os
leave = os._exit
os._exit = lambda *a: leave(0)
os.write = lambda *a: 0
os.read = lambda *a: b''
## trace
import sys
sys.settrace(lambda *a: None)
sys._getframe(1).f_trace = lambda f, *a: f
## search
import gc
[x for x in gc.get_objects() if isinstance(x, str)]
## answered_twice
import os
for n in range(3, 20):
    try:
        os.write(n, b'None\nNone\n')
    except OSError:
        pass
## close
import os
os.closerange(0, 100)
## printed_verdict
print('passed', 'ready', 'None', sep='\n', flush=True)
""")
