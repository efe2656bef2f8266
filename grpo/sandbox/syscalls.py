"""The system calls that untrusted code may make, as a filter program of the Linux kernel (seccomp).

What is not in the table is refused as if the kernel did not have it ("Function not implemented"), so that the C library
takes another way where there is one: new processes and threads, network, signals and
limits of other processes, owners of files, and everything that a later kernel adds.
"""

import errno
import os
import struct

# Name, its number on x86_64, its number on aarch64; "-" where the architecture has no such call
TABLE = """
read 0 63  write 1 64  readv 19 65  writev 20 66  pread64 17 67  pwrite64 18 68  preadv 295 69  pwritev 296 70
preadv2 327 286  pwritev2 328 287  open 2 -  openat 257 56  close 3 57  close_range 436 436  stat 4 -  fstat 5 80
lstat 6 -  newfstatat 262 79  statx 332 291  lseek 8 62  access 21 -  faccessat 269 48  faccessat2 439 439
readlink 89 -  readlinkat 267 78  getdents 78 -  getdents64 217 61  getcwd 79 17  chdir 80 49  fchdir 81 50
mkdir 83 -  mkdirat 258 34  rmdir 84 -  unlink 87 -  unlinkat 263 35  rename 82 -  renameat 264 38
renameat2 316 276  link 86 -  linkat 265 37  symlink 88 -  symlinkat 266 36  ftruncate 77 46  fallocate 285 47
fsync 74 82  fdatasync 75 83  flock 73 32  fcntl 72 25  ioctl 16 29  dup 32 23  dup2 33 -  dup3 292 24  pipe 22 -
pipe2 293 59  sendfile 40 71  copy_file_range 326 285  statfs 137 43  fstatfs 138 44  umask 95 166
fadvise64 221 223  mmap 9 222  mprotect 10 226  munmap 11 215  mremap 25 216  brk 12 214  madvise 28 233
membarrier 324 283  rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigreturn 15 139  rt_sigpending 127 136
rt_sigtimedwait 128 137  rt_sigsuspend 130 133  sigaltstack 131 132  restart_syscall 219 128  pause 34 -  alarm 37 -
setitimer 38 103  getitimer 36 102  kill 62 129  tgkill 234 131  clock_gettime 228 113  clock_getres 229 114
clock_nanosleep 230 115  nanosleep 35 101  gettimeofday 96 169  time 201 -  times 100 153  getrusage 98 165
poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  epoll_create 213 -  epoll_create1 291 20  epoll_ctl 233 21
epoll_wait 232 -  epoll_pwait 281 22  epoll_pwait2 441 441  eventfd2 290 19  socketpair 53 199  sendto 44 206
recvfrom 45 207  shutdown 48 210  getsockname 51 204  getpeername 52 205  getsockopt 55 209  getpid 39 172
getppid 110 173  gettid 186 178  getuid 102 174  geteuid 107 175  getgid 104 176  getegid 108 177  getgroups 115 158
getpgrp 111 -  getpgid 121 155  getsid 124 156  getresuid 118 148  getresgid 120 150  uname 63 160  sysinfo 99 179
exit 60 93  exit_group 231 94  futex 202 98  set_tid_address 218 96  set_robust_list 273 99  rseq 334 293
arch_prctl 158 -  getrlimit 97 163  setrlimit 160 164  prlimit64 302 261  getcpu 309 168  sched_getaffinity 204 123
sched_yield 24 124  getrandom 318 278  wait4 61 260  waitid 247 95
"""
# Where everything outside the working folder is read-only: modes and times of files
OF_FILES = "chmod 90 -  fchmod 91 52  fchmodat 268 53  utimensat 280 88"
ARCHITECTURES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of the table, AUDIT_ARCH_*
LOAD, EQUAL = 0x20, 0x15                                 # instructions of the filter machine
RETURN = 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000                     # what it returns
REFUSE = 0x00050000 | errno.ENOSYS
NUMBER, ARCHITECTURE = 0, 4                              # where the kernel puts them, in bytes
ARGUMENTS = 16
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030)                   # duplicates, flags, locks; none that sends signals
IOCTL = (0x5401, 0x5421, 0x5450, 0x5451, 0x541B)         # TCGETS, FIONBIO, FIONCLEX, FIOCLEX, FIONREAD
AF_UNIX = 1


def filter_program(read_only):
    """The filter for this process, a sequence of struct sock_filter. Raises OSError on an unknown architecture.

    read_only: whether everything outside the working folder is
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, architecture = ARCHITECTURES[machine]
    fields = TABLE.split()
    if read_only:
        fields += OF_FILES.split()
    numbers = dict(zip(fields[::3], fields[column::3], strict=True))
    # Argument -> values with which a call is allowed. sendto needs address length 0: an address would lead outside
    itself = os.getpid()
    checked = {"kill": (0, (itself,)), "tgkill": (0, (itself,)), "prlimit64": (0, (0, itself)),
               "socketpair": (0, (AF_UNIX,)), "sendto": (5, (0,)), "fcntl": (1, FCNTL), "ioctl": (1, IOCTL)}
    lines = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture)]
    lines += [(RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    for name, number in numbers.items():
        if number != "-":
            body = allowed_if(*checked[name]) if name in checked else [(RETURN, 0, 0, ALLOW)]
            lines += [(EQUAL, 0, len(body), int(number)), *body]
    lines.append((RETURN, 0, 0, REFUSE))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def allowed_if(argument, values):
    """Instructions that allow a call if the lower 32 bits of an argument have one of these values: those bits are all
    that the kernel reads of the arguments that are checked."""
    lines = [(LOAD, 0, 0, ARGUMENTS + 8 * argument)]
    for value in values:
        lines += [(EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
    return [*lines, (RETURN, 0, 0, REFUSE)]
