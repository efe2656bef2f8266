"""Sandboxes a process with the Linux kernel: namespaces, Landlock, seccomp. This holds even if the code takes over its
interpreter.

The child process of run.py applies it to itself before running the code. Uses only the standard library.
"""

import ctypes
import errno
import os
import signal
import struct
import sys

PARTS = ("namespaces", "Landlock", "seccomp")
FOLDER_BYTES = 16 << 20  # maximum size of the working folder
FILES = 1000             # maximum number of files and folders in it
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's system calls, on all architectures
RIGHTS = (13, 14, 15, 15, 16)  # number of rights in Landlock 1, 2, ...; added: files, moves, truncating, none, ioctl
# Landlock's rights, one bit each. From the right: run a program, write, read and list; remove folders and files, make
# devices and folders; make files, sockets, pipes and block devices; make links, move, truncate, ioctl
READ = 0b1100          # read files, list folders
FILE = 0b0110          # rights that apply to a file: write and read it
INSIDE = 0b0111_0001_1011_1110  # the working folder: no programs, devices, sockets or pipes
# Read by the standard library
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo",
             "/dev/urandom")
# Allowed system calls: name, number on x86_64, number on aarch64; "-" if the architecture lacks the call. All other
# calls fail with ENOSYS, so that the C library falls back: new processes and threads, network, signals to and limits of
# other processes, owners, modes and times of files, and calls added by later kernels
TABLE = """
read 0 63  write 1 64  readv 19 65  writev 20 66  pread64 17 67  pwrite64 18 68  preadv 295 69  pwritev 296 70
preadv2 327 286  pwritev2 328 287  open 2 -  openat 257 56  close 3 57  close_range 436 436  stat 4 -  fstat 5 80
lstat 6 -  newfstatat 262 79  statx 332 291  lseek 8 62  access 21 -  faccessat 269 48  faccessat2 439 439
readlink 89 -  readlinkat 267 78  getdents 78 -  getdents64 217 61  getcwd 79 17  chdir 80 49  fchdir 81 50  mkdir 83 -
mkdirat 258 34  rmdir 84 -  unlink 87 -  unlinkat 263 35  rename 82 -  renameat 264 38  renameat2 316 276  link 86 -
linkat 265 37  symlink 88 -  symlinkat 266 36  ftruncate 77 46  fallocate 285 47  fsync 74 82  fdatasync 75 83
flock 73 32  fcntl 72 25  ioctl 16 29  dup 32 23  dup2 33 -  dup3 292 24  pipe 22 -  pipe2 293 59  sendfile 40 71
copy_file_range 326 285  statfs 137 43  fstatfs 138 44  umask 95 166  fadvise64 221 223  mmap 9 222  mprotect 10 226
munmap 11 215  mremap 25 216  brk 12 214  madvise 28 233  membarrier 324 283  rt_sigaction 13 134  rt_sigprocmask 14 135
rt_sigreturn 15 139  rt_sigpending 127 136  rt_sigtimedwait 128 137  rt_sigsuspend 130 133  sigaltstack 131 132
restart_syscall 219 128  pause 34 -  alarm 37 -  setitimer 38 103  getitimer 36 102  kill 62 129  tgkill 234 131
clock_gettime 228 113  clock_getres 229 114  clock_nanosleep 230 115  nanosleep 35 101  gettimeofday 96 169  time 201 -
times 100 153  getrusage 98 165  poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  epoll_create 213 -
epoll_create1 291 20  epoll_ctl 233 21  epoll_wait 232 -  epoll_pwait 281 22  epoll_pwait2 441 441  eventfd2 290 19
socketpair 53 199  sendto 44 206  recvfrom 45 207  shutdown 48 210  getsockname 51 204  getpeername 52 205
getsockopt 55 209  getpid 39 172  getppid 110 173  gettid 186 178  getuid 102 174  geteuid 107 175  getgid 104 176
getegid 108 177  getgroups 115 158  getpgrp 111 -  getpgid 121 155  getsid 124 156  getresuid 118 148  getresgid 120 150
uname 63 160  sysinfo 99 179  exit 60 93  exit_group 231 94  futex 202 98  set_tid_address 218 96
set_robust_list 273 99  rseq 334 293  arch_prctl 158 -  getrlimit 97 163  setrlimit 160 164  prlimit64 302 261
getcpu 309 168  sched_getaffinity 204 123  sched_yield 24 124  getrandom 318 278  wait4 61 260  waitid 247 95
"""
ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of the table, AUDIT_ARCH_*
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06            # instructions of BPF
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.ENOSYS  # results of a filter
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16        # byte offsets in struct seccomp_data
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)            # duplicates, flags, locks; no command that sends signals
IOCTL = (0x5401, 0x5421, 0x5450, 0x5451, 0x541B)  # TCGETS, FIONBIO, FIONCLEX, FIOCLEX, FIONREAD
AF_UNIX = 1
# Calls allowed only for some values of an argument: {name: (index of the argument, values)}. sendto: only address
# length 0, because an address leads outside
CHECKED = {
    "socketpair": (0, [AF_UNIX]),
    "sendto": (5, [0]),
    "fcntl": (1, FCNTL),
    "ioctl": (1, IOCTL)}


def protect(parts, parent):
    """Drops privileges and applies the given parts of PARTS. Raises OSError if the kernel refuses a part.
    parent: process id; this process is killed when the parent ends"""
    if "namespaces" in parts:
        enter_namespaces()
    drop_privileges()
    end_with(parent)  # after changing credentials, which could undo it
    if "Landlock" in parts:
        restrict_files(writable="namespaces" in parts)
    if "seccomp" in parts:  # last, because it refuses calls that the other parts need
        restrict_calls(filter_program())


def end_with(parent):
    """Makes the kernel kill this process when its parent ends. parent: process id of the parent"""
    call("prctl", 1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def enter_namespaces():
    """Isolates the process from the network, and makes all files read-only outside the working folder. The working
    folder becomes an in-memory file system of at most FOLDER_BYTES."""
    user = os.getuid()
    group = os.getgid()
    call("unshare", 0x10000000 | 0x20000 | 0x40000000 | 0x08000000)  # CLONE_NEWUSER, NEWNS, NEWNET, NEWIPC
    files = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, line in files.items():
        with open(f"/proc/self/{name}", "w") as f:
            f.write(line)
    call("mount", b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC, MS_PRIVATE
    attributes = struct.pack("=4Q", 1, 0, 0, 0)  # MOUNT_ATTR_RDONLY
    call("syscall", 442, -100, b"/", 0x8000, attributes, len(attributes))  # mount_setattr, AT_FDCWD, AT_RECURSIVE
    folder = os.getcwd()
    limits = f"size={FOLDER_BYTES},nr_inodes={FILES}"
    flags = 2 | 4 | 8  # MS_NOSUID, NODEV, NOEXEC
    call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", flags, limits.encode())
    os.chdir(folder)


def drop_privileges():
    """Drops all capabilities, even root's. Programs started by this process cannot gain any."""
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    call("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))  # _LINUX_CAPABILITY_VERSION_3


def restrict_files(writable):
    """Restricts file access with Landlock: outside the working folder only files of the standard library can be opened,
    read-only. writable: True if the working folder is in memory, so that files may be written there"""
    version = call("syscall", CREATE_RULESET, None, 0, 1)
    known = RIGHTS[min(version, len(RIGHTS)) - 1]
    all_rights = (1 << known) - 1
    rules = struct.pack("=Q", all_rights)
    ruleset = call("syscall", CREATE_RULESET, rules, len(rules), 0)
    libraries = os.path.join(sys.base_prefix, "lib")
    allowed = dict.fromkeys([*sys.path, libraries, *LIBRARIES], READ)
    allowed["."] = INSIDE if writable else READ
    allowed[os.devnull] = FILE
    for path, rights in allowed.items():
        if os.path.exists(path):
            rights &= all_rights if os.path.isdir(path) else FILE
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", rights, place)
            call("syscall", ADD_RULE, ruleset, 1, rule, 0)
            os.close(place)
    call("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def restrict_calls(lines):
    """Installs a seccomp filter, which the kernel runs at every system call."""
    kept = ctypes.create_string_buffer(lines)  # the kernel reads it during the call
    program = struct.pack("@HP", len(lines) // 8, ctypes.addressof(kept))
    call("prctl", 22, 2, program, 0, 0)  # PR_SET_SECCOMP


def filter_program():
    """Builds the filter of this process, an array of struct sock_filter. Raises OSError on an unknown architecture.

    A line is (instruction, lines to skip if true, lines to skip if false, operand). The filter kills the process at a
    call of another architecture, whose numbers mean other calls. Then it compares the call's number with each number in
    the table. The lines after a comparison allow or refuse that call, and are skipped if the numbers differ.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, architecture = ARCHITECTURES[machine]
    fields = TABLE.split()
    numbers = dict(zip(fields[::3], fields[column::3], strict=True))
    itself = os.getpid()
    signals = {"kill": (0, [itself]), "tgkill": (0, [itself])}
    checked = CHECKED | signals | {"prlimit64": (0, [0, itself])}
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture)]
    lines += [(RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    for name, number in numbers.items():
        body = [(RETURN, 0, 0, ALLOW)]
        if name in checked:
            body = allowed_if(*checked[name])
        if number != "-":
            lines += [(EQUAL, 0, len(body), int(number)), *body]
    lines.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def allowed_if(argument, values):
    """Returns instructions that allow a call if the lower 32 bits of an argument equal one of these values."""
    lines = [(LOAD, 0, 0, ARGUMENTS + 8 * argument)]
    for value in values:
        lines += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*lines, (RETURN, 0, 0, REFUSE)]


def call(name, *arguments):
    """Calls a function of the C library. Raises OSError if it fails."""
    function = ctypes.CDLL(None, use_errno=True)[name]
    converted = [ctypes.c_long(x) if isinstance(x, int) else x for x in arguments]
    result = function(*converted)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result
